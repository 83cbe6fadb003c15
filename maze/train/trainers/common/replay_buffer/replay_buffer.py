"""Interface of replay buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Union

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.train.trainers.common.replay_buffer.rows import record_of_row, rows_of_records
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch, TransitionColumns, TransitionRows

Transition = Union[StructuredSpacesRecord, SpacesTrajectoryRecord]
"""One environment step, or a rollout that is kept as a whole."""


class BaseReplayBuffer(ABC):
    """Keep past experience to learn from again.

    It holds items, which are either all single environment steps or all rollouts of one length.

    The methods (:meth:`add_rollout`, :meth:`add_transition`, :meth:`sample_batch`, `len`) are enough for a buffer of
    single steps with one actor. Trainers use rows and batches of arrays, which this class converts from and to these
    records; :class:`~maze.train.trainers.common.replay_buffer.uniform_replay_buffer.UniformReplayBuffer` holds arrays,
    and all other buffers are derived from that one.
    """

    n_rows_added: int = 0
    """Number of environment steps ever added: the number that the next one gets."""
    item_length: int = 1
    """Number of environment steps of an item."""
    lacks_rows: bool = False
    """Whether rows that were added before the run was resumed are missing."""
    n_bytes: int = 0
    """Size of the items in a checkpoint."""
    avg_pick_per_transition: float = 0.0
    """Mean number of times that an item was sampled, over all that were ever added, where it is counted."""

    @abstractmethod
    def add_rollout(self, rollout: SpacesTrajectoryRecord | list[StructuredSpacesRecord]) -> None:
        """Add each step of a rollout as an item of its own.

        :param rollout: Successive steps of one environment.
        """

    @abstractmethod
    def sample_batch(self, n_samples: int, learner_device: str) -> list[Transition]:
        """Draw items.

        :param n_samples: Number of items.
        :param learner_device: Device of their tensors.
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
        :raises ConfigError: The buffer cannot store these items.
        """
        if len(actors) > 1 or item_length > 1:
            raise ConfigError(
                f"replay_buffer: a {type(self).__name__} keeps single steps of one actor, found {len(actors)} actors "
                f"and items of {item_length} steps. Derive it from UniformReplayBuffer."
            )
        self._actors = list(actors)

    def add_rows(self, rows: TransitionRows) -> None:
        """Add steps that are rows already; with items of several steps, whole items.

        :param rows: The steps, those of an item one after another.
        """
        self.n_rows_added += len(rows)
        for row in range(len(rows)):
            self.add_transition(record_of_row(rows, row, self._actors))

    def sample_transitions(self, n_samples: int, learner_device: str) -> TransitionBatch:
        """Draw items as one batch of environment steps, those of an item one after the other.

        :param n_samples: Number of items.
        :param learner_device: Device of the tensors.
        """
        items: list[Any] = self.sample_batch(n_samples, learner_device)
        rows = rows_of_records(items, self._actors, first_number=0)
        columns = TransitionColumns.for_rows(n_samples, self._actors, rows)
        columns.add(rows)
        return columns.read(np.arange(n_samples), learner_device)

    def state_dict(self, with_content: bool = True) -> dict[str, Any]:
        """Return the state for checkpoints: plain values and tensors.

        :param with_content: Whether the items are part of it; without them (`content` is `None`), a run that is
            resumed fills the buffer anew.
        """
        return {"content": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        :param state: As :meth:`state_dict` gave it.
        """
        self.lacks_rows = True
