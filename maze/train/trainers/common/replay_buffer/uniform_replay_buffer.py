"""Replay buffers from which all items are drawn equally often, or those with large errors more often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.utils.seeding import generator_state, set_generator_state
from maze.train.trainers.common.replay_buffer.replay_buffer import BaseReplayBuffer, Transition
from maze.train.trainers.common.replay_buffer.rows import record_of_batch, rows_of_records
from maze.train.trainers.common.replay_buffer.transitions import (
    TransitionBatch,
    TransitionColumns,
    TransitionRows,
    usual_steps,
)


class UniformReplayBuffer(BaseReplayBuffer):
    """Keep the latest items in arrays that are allocated once, and draw them with replacement.

    The arrays are made for the first item, or before by :meth:`allocate`.

    :param buffer_size: Maximum number of items.
    :param seed: Seed of the draws.
    :raises ConfigError: There is no room for an item.
    """

    def __init__(self, buffer_size: int, seed: int) -> None:
        if buffer_size < 1:
            raise ConfigError(f"algorithm.replay_buffer_size: expected at least 1, found {buffer_size!r}.")
        self.buffer_size = buffer_size
        self.n_drawn = 0
        """Number of items ever drawn."""
        self._rng = np.random.default_rng(seed)
        self._columns: TransitionColumns | None = None
        self._action_spaces: list[spaces.Dict] | None = None

    def __len__(self) -> int:
        return 0 if self._columns is None else len(self._columns) // self.item_length

    @property
    def n_added(self) -> int:
        """Number of items ever added."""
        return 0 if self._columns is None else self._columns.n_added // self.item_length

    @property
    @override(BaseReplayBuffer)
    def n_rows_added(self) -> int:  # type: ignore[override]  # read only
        """Number of environment steps ever added: the number that the next one gets."""
        return 0 if self._columns is None else self._columns.n_added

    @property
    @override(BaseReplayBuffer)
    def avg_pick_per_transition(self) -> float:  # type: ignore[override]  # read only
        """Mean number of times that an item was sampled, over all that were ever added."""
        return self.n_drawn / self.n_added if self.n_added else 0.0

    @property
    @override(BaseReplayBuffer)
    def n_bytes(self) -> int:  # type: ignore[override]  # read only
        return self.columns.n_bytes

    @property
    def columns(self) -> TransitionColumns:
        """The arrays themselves.

        :raises ConfigError: The buffer is empty.
        """
        if self._columns is None:
            raise ConfigError("The replay buffer is empty; add transitions before using it.")
        return self._columns

    @override(BaseReplayBuffer)
    def allocate(
        self,
        actors: Sequence[ActorID],
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        item_length: int = 1,
    ) -> None:
        """Make the arrays for an environment; if there are some already, they stay.

        :param actors: The actors of an environment step, in their order.
        :param observation_spaces_dict: Observation spaces by step key.
        :param action_spaces_dict: Action spaces by step key.
        :param item_length: Number of environment steps of an item.
        """
        if self._columns is None:
            self.item_length = item_length
            self._action_spaces = [action_spaces_dict[actor.step_key] for actor in actors]
            missing = usual_steps(actors, observation_spaces_dict, action_spaces_dict)
            self._columns = TransitionColumns(self.buffer_size * item_length, actors, *missing)

    @override(BaseReplayBuffer)
    def add_rollout(self, rollout: SpacesTrajectoryRecord | list[StructuredSpacesRecord]) -> None:
        records: Any = rollout
        self._add_records(getattr(rollout, "step_records", records), item_length=1)

    @override(BaseReplayBuffer)
    def add_transition(self, transition: Transition) -> None:
        records: Any = getattr(transition, "step_records", [transition])
        self._add_records(records, item_length=len(records))

    @override(BaseReplayBuffer)
    def add_rows(self, rows: TransitionRows) -> None:
        """Add steps that are rows already; with items of several steps, whole items."""
        self.columns.add(rows)

    @override(BaseReplayBuffer)
    def sample_batch(self, n_samples: int, learner_device: str) -> list[Transition]:
        columns = self.columns
        items: list[Transition] = []
        for slots in self._draw(n_samples).reshape(n_samples, self.item_length):
            steps = [record_of_batch(columns.read(slots[i : i + 1], learner_device)) for i in range(len(slots))]
            if self.item_length == 1:
                items.append(steps[0])
            else:
                trajectory = SpacesTrajectoryRecord(None)
                trajectory.step_records = steps
                items.append(trajectory)
        return items

    @override(BaseReplayBuffer)
    def sample_transitions(self, n_samples: int, learner_device: str) -> TransitionBatch:
        """Draw items as one batch of environment steps, those of an item one after the other.

        :param n_samples: Number of items.
        :param learner_device: Device of the tensors.
        """
        return self.columns.read(self._draw(n_samples), learner_device)

    @override(BaseReplayBuffer)
    def state_dict(self, with_content: bool = True) -> dict[str, Any]:
        """Return the generator, counts and optionally all items; plain values and tensors."""
        return {
            "generator": list(generator_state(self._rng).values()),
            "n_drawn": self.n_drawn,
            "item_length": self.item_length,
            "content": self.columns.state_dict() if with_content and self._columns is not None else None,
        }

    @override(BaseReplayBuffer)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state; without content in it, with the items there are, of which none was drawn.

        :raises ConfigError: The items have another length, or there is room for more or fewer of them.
        """
        content, length = state["content"], state["item_length"]
        if content is not None and (length, content["capacity"]) != (self.item_length, self.columns.capacity):
            raise ConfigError(
                f"algorithm.replay_buffer_size, n_rollout_steps: the saved replay buffer holds {content['capacity']} "
                f"steps in items of {length}, this one {self.columns.capacity} in items of "
                f"{self.item_length}. Continue with the configuration of the run that was saved."
            )
        set_generator_state(self._rng, dict(zip(generator_state(self._rng), state["generator"], strict=True)))
        self.lacks_rows = content is None
        if content is not None:
            self.n_drawn = state["n_drawn"]
            self.columns.load_state_dict(content)

    def _draw(self, n_samples: int) -> np.ndarray:
        if not len(self):
            raise ConfigError("The replay buffer is empty; add transitions before drawing any.")
        self.n_drawn += n_samples
        items = self._rng.integers(0, len(self), n_samples)
        if self.item_length == 1:
            return items
        return np.ravel(items[:, None] * self.item_length + np.arange(self.item_length))

    def _add_records(self, records: Sequence[StructuredSpacesRecord], item_length: int) -> None:
        if not records:
            return
        if self._columns is not None and self.item_length != item_length:
            raise ConfigError(
                f"The replay buffer holds items of {self.item_length} environment steps; one of {item_length} cannot "
                "be added."
            )
        actors = self._columns.actors if self._columns is not None else max([r.actor_ids for r in records], key=len)
        missing = None if self._columns is None else self._columns.missing
        rows = rows_of_records(records, actors, self.n_rows_added, self._action_spaces, missing)
        if self._columns is None:
            self._columns = TransitionColumns.for_rows(self.buffer_size * item_length, actors, rows)
        self.item_length = item_length
        self.columns.add(rows)


# Added to errors, so that every step is drawn now and then.
_SMALLEST = 1e-6
# Number of priorities that are summed up together.
_BLOCK = 1024


class PrioritizedReplayBuffer(UniformReplayBuffer):
    """Draw steps in proportion to a power of their last error (Schaul et al. 2016, proportional variant).

    New steps get the highest priority there was. Batches are drawn in strata of equal priority, and carry importance
    weights `(n * probability) ** -beta`, scaled by the largest of the batch.

    :param buffer_size: Maximum number of steps.
    :param seed: Seed of the draws.
    :param alpha: Power of the errors; 0 draws all equally often.
    :param beta: Power of the importance weights at the start; 1 makes up for all of the bias. May be changed.
    """

    def __init__(self, buffer_size: int, seed: int, alpha: float = 0.6, beta: float = 0.4) -> None:
        super().__init__(buffer_size, seed)
        self.alpha = alpha
        self.beta = beta
        self._highest = 1.0
        self._n_known = 0
        self._priorities = np.zeros((-(-buffer_size // _BLOCK), _BLOCK))
        # Sums of the blocks of priorities.
        self._sums = np.zeros(len(self._priorities))

    @override(UniformReplayBuffer)
    def sample_transitions(self, n_samples: int, learner_device: str) -> TransitionBatch:
        batch = super().sample_transitions(n_samples, learner_device)
        probabilities = self._priorities.ravel()[batch.slots] / self._sums.sum()
        weights = (len(self) * probabilities) ** -self.beta
        batch.weights = torch.from_numpy((weights / weights.max()).astype(np.float32)).to(learner_device)
        return batch

    def set_errors(self, slots: np.ndarray, errors: np.ndarray) -> None:
        """Set the priorities of rows by their errors.

        :param slots: int64 `[B]`: indices of the rows, see
            :class:`~maze.train.trainers.common.replay_buffer.replay_buffer.TransitionBatch`.
        :param errors: float `[B]`: absolute errors.
        """
        priorities = (np.abs(errors) + _SMALLEST) ** self.alpha
        self._highest = max(self._highest, float(priorities.max()))
        self._set(slots, priorities)

    def _set(self, slots: np.ndarray, priorities: np.ndarray) -> None:
        self._priorities.ravel()[slots] = priorities
        blocks = np.unique(slots // _BLOCK)
        self._sums[blocks] = self._priorities[blocks].sum(1)

    @override(UniformReplayBuffer)
    def _draw(self, n_samples: int) -> np.ndarray:
        self._take_notice_of_new_rows()
        if not len(self):
            return super()._draw(n_samples)  # raises the error for an empty buffer
        self.n_drawn += n_samples
        ends = self._sums.cumsum()
        wanted = (np.arange(n_samples) + self._rng.random(n_samples)) / n_samples * ends[-1]
        blocks = np.searchsorted(ends, wanted, side="right").clip(max=len(ends) - 1)
        in_block = (wanted - ends[blocks] + self._sums[blocks])[:, None]
        slots: np.ndarray = blocks * _BLOCK + (self._priorities[blocks].cumsum(1) <= in_block).sum(1)
        return slots.clip(max=len(self) - 1)

    def _take_notice_of_new_rows(self) -> None:
        n_new = min(self.n_rows_added - self._n_known, self.buffer_size)
        if n_new:
            slots = np.arange(self.n_rows_added - n_new, self.n_rows_added) % self.buffer_size
            self._set(slots, np.full(n_new, self._highest))
            self._n_known = self.n_rows_added

    @override(UniformReplayBuffer)
    def state_dict(self, with_content: bool = True) -> dict[str, Any]:
        self._take_notice_of_new_rows()
        content = torch.from_numpy(self._priorities.ravel()[: self.buffer_size].copy()) if with_content else None
        return {**super().state_dict(with_content), "priorities": content, "highest_priority": self._highest}

    @override(UniformReplayBuffer)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._highest = state.get("highest_priority", self._highest)  # a uniform buffer had no priorities
        if state.get("priorities") is not None:
            self._set(np.arange(self.buffer_size), state["priorities"].numpy())
            self._n_known = self.n_rows_added
