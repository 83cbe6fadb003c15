"""Access to what a trajectory recording needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType

if TYPE_CHECKING:
    from maze.core.rendering.renderer import Renderer


class RecordableEnvMixin(ABC):
    """Environment whose states and actions can be recorded and rendered again later."""

    @abstractmethod
    def get_maze_state(self) -> MazeStateType:
        """The current state of the simulation."""

    @abstractmethod
    def get_maze_action(self) -> MazeActionType:
        """The action last given to the simulation; None before the first one of the episode."""

    @abstractmethod
    def get_episode_id(self) -> str:
        """Identifies the current episode."""

    @abstractmethod
    def get_renderer(self) -> Renderer | None:
        """Draws states and actions; `None` where nothing can be drawn."""
