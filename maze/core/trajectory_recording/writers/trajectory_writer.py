"""Interface of everything that stores episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord


class TrajectoryWriter(ABC):
    """Stores finished episodes."""

    @abstractmethod
    def write(self, episode_record: StateTrajectoryRecord) -> None:
        """Stores an episode.

        :param episode_record: The episode; it is not changed afterwards.
        """
