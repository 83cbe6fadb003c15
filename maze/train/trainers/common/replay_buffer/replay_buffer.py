"""What a replay buffer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Union

from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord

Transition = Union[StructuredSpacesRecord, SpacesTrajectoryRecord]
"""One environment step, or a rollout that is kept as a whole."""


class BaseReplayBuffer(ABC):
    """Keeps past experience to learn from again.

    It holds items, which are either all single environment steps or all rollouts of one length.

    This is what a buffer is asked for from outside. Trainings with SAC go past it for speed, by rows of arrays, and
    take no other buffer than
    :class:`~maze.train.trainers.common.replay_buffer.uniform_replay_buffer.UniformReplayBuffer`; a buffer of another
    kind is best derived from that one.
    """

    @abstractmethod
    def add_rollout(self, rollout: SpacesTrajectoryRecord | list[StructuredSpacesRecord]) -> None:
        """Adds each step of a rollout as an item of its own.

        :param rollout: Successive steps of one environment.
        """

    @abstractmethod
    def sample_batch(self, n_samples: int, learner_device: str) -> list[Transition]:
        """Draws items.

        :param n_samples: Number of items.
        :param learner_device: Where their tensors shall be.
        """

    @abstractmethod
    def add_transition(self, transition: Transition) -> None:
        """Adds one item.

        :param transition: A step, or a whole rollout.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Number of items held."""
