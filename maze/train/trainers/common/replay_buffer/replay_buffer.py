"""Interface of replay buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Union

import torch
from gymnasium import spaces

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch, TransitionRows

Transition = Union[StructuredSpacesRecord, SpacesTrajectoryRecord]
"""One environment step, or a rollout that is kept as a whole."""


class BaseReplayBuffer(ABC):
    """Keeps past experience to learn from again.

    It holds items, which are either all single environment steps or all rollouts of one length.

    The methods (:meth:`add_rollout`, :meth:`add_transition`, :meth:`sample_batch`, `len`) are enough for a
    buffer of one's own. Trainers use rows and batches of arrays, which this class makes of these records;
    :class:`~maze.train.trainers.common.replay_buffer.uniform_replay_buffer.UniformReplayBuffer` keeps arrays from the
    beginning, and a buffer for long runs is best derived from that one.
    """

    n_rows_added: int = 0
    """Number of environment steps ever added: the number that the next one gets."""
    item_length: int = 1
    """Number of environment steps of an item."""
    lacks_rows: bool = False
    """Whether rows that were added before the run was resumed are missing."""
    n_bytes: int = 0
    """Size of what a checkpoint holds of the items."""
    avg_pick_per_transition: float = 0.0
    """How often an item was drawn, on average over all that were ever added, where that is counted."""

    @abstractmethod
    def add_rollout(self, rollout: SpacesTrajectoryRecord | list[StructuredSpacesRecord]) -> None:
        """Add each step of a rollout as an item of its own.

        :param rollout: Successive steps of one environment.
        """

    @abstractmethod
    def sample_batch(self, n_samples: int, learner_device: str) -> list[Transition]:
        """Draw items.

        :param n_samples: Number of items.
        :param learner_device: Where their tensors shall be.
        """

    @abstractmethod
    def add_transition(self, transition: Transition) -> None:
        """Add one item.

        :param transition: A step, or a whole rollout.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items held."""

    # -- methods of trainers ---------------------------------------------------------------------------

    def allocate(
        self,
        actors: Sequence[ActorID],
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        item_length: int = 1,
    ) -> None:
        """Prepare the buffer for the environment.

        :param actors: The actors of an environment step, in their order.
        :param observation_spaces_dict: Observation spaces by step key.
        :param action_spaces_dict: Action spaces by step key.
        :param item_length: Number of environment steps of an item.
        :raises ConfigError: The buffer cannot keep what is going to be added.
        """
        if len(actors) > 1:
            raise ConfigError(
                f"replay_buffer: a {type(self).__name__} keeps single steps, which do not tell what the second of the "
                f"{len(actors)} actors saw in the step after. Derive it from UniformReplayBuffer."
            )
        self._actor = actors[0]
        self._shapes = [
            {key: space.shape for key, space in of_key[self._actor.step_key].items()}
            for of_key in (observation_spaces_dict, action_spaces_dict)
        ]
        self.item_length = item_length

    def add_rows(self, rows: TransitionRows) -> None:
        """Add steps that are rows already; with items of several steps, whole items.

        :param rows: The steps, those of an item one after another.
        """
        records = [self._record(rows, row) for row in range(len(rows))]
        self.n_rows_added += len(rows)
        if self.item_length == 1:
            for record in records:
                self.add_transition(record)
            return
        for first in range(0, len(records), self.item_length):
            item = SpacesTrajectoryRecord(None)
            item.step_records = records[first : first + self.item_length]
            self.add_transition(item)

    def sample_transitions(self, n_samples: int, learner_device: str) -> TransitionBatch:
        """Draw items as one batch of environment steps, those of an item one after the other.

        :param n_samples: Number of items.
        :param learner_device: Where the tensors shall be.
        """
        steps: list[SpacesRecord] = []
        for item in self.sample_batch(n_samples, learner_device):
            records = [item] if isinstance(item, StructuredSpacesRecord) else item.step_records
            steps += [record.substep_records[0] for record in records]

        def stacked(values: list[Any], shapes: Mapping[str, Any]) -> dict[str, torch.Tensor]:
            return {
                key: torch.stack(
                    [torch.as_tensor(value[key], device=learner_device).reshape(shape) for value in values]
                )
                for key, shape in shapes.items()
            }

        observation_shapes, action_shapes = self._shapes
        return TransitionBatch(
            actors=[self._actor],
            observations=[stacked([step.observation for step in steps], observation_shapes)],
            actions=[stacked([step.action for step in steps], action_shapes)],
            rewards=torch.tensor([[float(step.reward)] for step in steps], device=learner_device),  # type: ignore[arg-type]
            next_observations=[stacked([step.next_observation for step in steps], observation_shapes)],
            terminated=torch.tensor([bool(step.done) for step in steps], device=learner_device),
            n_substeps=None,
            has_next_step=None,
        )

    def state_dict(self, with_content: bool = True) -> dict[str, Any]:
        """State for checkpoints: plain values and tensors.

        :param with_content: Whether the items are part of it; without them (`content` is `None`), a training that is
            resumed fills the buffer anew.
        """
        return {"content": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        :param state: As :meth:`state_dict` gave it.
        """
        self.lacks_rows = True

    def _record(self, rows: TransitionRows, row: int) -> StructuredSpacesRecord:
        substep = SpacesRecord(
            actor_id=self._actor,
            observation={key: array[row] for key, array in rows.observations[0].items()},
            action={key: array[row] for key, array in rows.actions[0].items()},
            reward=float(rows.rewards[row, 0]),
            done=bool(rows.terminated[row]),
            next_observation={key: array[row] for key, array in rows.next_observation.items()},
        )
        return StructuredSpacesRecord([substep])
