"""Interface for the recording of trajectories."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType

if TYPE_CHECKING:
    from maze.core.rendering.renderer import Renderer


class RecordableEnvMixin(ABC):
    """Environment whose states and actions can be recorded and rendered later."""

    @abstractmethod
    def get_maze_state(self) -> MazeStateType:
        """Return the current state of the simulation."""

    @abstractmethod
    def get_maze_action(self) -> MazeActionType:
        """Return the last action of the simulation; `None`: there was none in this episode."""

    @abstractmethod
    def get_episode_id(self) -> str:
        """Return the identity of the current episode."""

    @abstractmethod
    def get_renderer(self) -> Renderer | None:
        """Return the renderer of states and actions; `None`: there is none."""
