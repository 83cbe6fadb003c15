"""From the simulation's state to what an agent observes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from gymnasium import spaces

from maze.core.env.maze_state import MazeStateType

ObservationType = Any
"""A dictionary of arrays in Maze environments; whatever an outer wrapper makes of it elsewhere."""


class ObservationConversionInterface(ABC):
    """Converts states of the simulation to observations (elements of a dictionary space)."""

    @abstractmethod
    def maze_to_space(self, maze_state: MazeStateType) -> ObservationType:
        """Converts a state to an element of :meth:`space`."""

    def space_to_maze(self, observation: ObservationType) -> MazeStateType:
        """Converts an observation back to a state, where the observation determines it.

        :raises NotImplementedError: The observation does not tell the state.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot recover a state from an observation.")

    @abstractmethod
    def space(self) -> spaces.Dict:
        """The observation space."""
