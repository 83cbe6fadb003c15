"""Conversions of simulations whose states and actions are dictionaries already."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.observation_conversion import ObservationConversionInterface


class IntegerActionConversion(ActionConversionInterface):
    """Passes on dictionaries of discrete actions as integers.

    :param space: The action space.
    """

    def __init__(self, space: spaces.Dict) -> None:
        self._space = space

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, Any], maze_state: Any) -> dict[str, int]:
        return {key: int(action[key]) for key in self._space}

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: dict[str, int]) -> dict[str, Any]:
        return dict(maze_action)

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space


class SelectingObservationConversion(ObservationConversionInterface):
    """Takes the entries of the space from the state.

    :param space: The observation space; its arrays are float32.
    """

    def __init__(self, space: spaces.Dict) -> None:
        self._space = space

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: dict[str, Any]) -> dict[str, np.ndarray]:
        return {key: np.array(maze_state[key], dtype=np.float32) for key in self._space}

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space


def box(low: float, high: float, *shape: int) -> spaces.Box:
    """A float32 box with the same bounds everywhere."""
    return spaces.Box(low, high, shape=shape, dtype=np.float32)
