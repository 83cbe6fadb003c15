"""Conversion of the simulation's states to observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.env.space_values import Cast, dict_specs

ObservationType = Any
"""A dictionary of arrays in Maze environments; wrappers may convert it to any object."""


class ObservationConversionInterface(ABC):
    """Convert states of the simulation to observations (elements of a dictionary space)."""

    @abstractmethod
    def maze_to_space(self, maze_state: MazeStateType) -> ObservationType:
        """Convert a state to an observation.

        :param maze_state: State of the simulation.
        :return: Element of :meth:`space`, with entries `[*space.shape]`.
        """

    def space_to_maze(self, observation: ObservationType) -> MazeStateType:
        """Convert an observation to a state, if the observation determines it.

        :param observation: Element of :meth:`space`.
        :raises NotImplementedError: The conversion has no inverse.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot convert observations to states.")

    @abstractmethod
    def space(self) -> spaces.Dict:
        """Return the observation space."""


class DictObservationConversion(ObservationConversionInterface):
    """Convert entries of the state to arrays of their spaces' types.

    For simulations whose states are dictionaries of numbers.

    :param entries: The spaces of the observed entries.
    """

    def __init__(self, entries: Mapping[str, spaces.Space[Any]]) -> None:
        self._space = entries if isinstance(entries, spaces.Dict) else spaces.Dict(dict(entries))
        self._casts = {
            key: Cast(dtype, f"observation `{key}`")
            for key, (_, dtype) in dict_specs(self._space, "observation").items()
        }

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {key: np.array(cast(maze_state[key])) for key, cast in self._casts.items()}

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space
