"""Key performance indicators."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from maze.core.log_events.episode_event_log import EpisodeEventLog

if TYPE_CHECKING:
    from maze.core.env.maze_state import MazeStateType


class KpiCalculator(ABC):
    """Calculate the key performance indicators of an ended episode."""

    @abstractmethod
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        """Return the indicators by name.

        :param episode_event_log: All events of the episode.
        :param last_maze_state: The environment's state at the end of the episode.
        """
