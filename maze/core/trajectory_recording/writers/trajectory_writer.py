"""Interface of writers of episodes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord


class TrajectoryWriter(ABC):
    """Store finished episodes."""

    @abstractmethod
    def write(self, episode_record: StateTrajectoryRecord) -> None:
        """Store an episode.

        :param episode_record: The episode, which is not modified afterwards.
        """
