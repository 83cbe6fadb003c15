"""Conversion of the agent's actions to those of the simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType


class ActionConversionInterface(ABC):
    """Convert between actions of an agent (elements of a dictionary space) and actions of the simulation."""

    uses_state: ClassVar[bool] = True
    """Whether `space_to_maze`, as defined in the same class, uses the state. `False` saves the creation of a state
    before every action; `maze_state` is `None` then."""

    @abstractmethod
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> MazeActionType:
        """Convert an agent's action.

        :param action: Element of :meth:`space`, with entries `[*space.shape]`.
        :param maze_state: State in which the action is taken; `None` if :attr:`uses_state` is false.
        :return: Action of the simulation.
        """

    def maze_to_space(self, maze_action: MazeActionType) -> dict[str, np.ndarray]:
        """Convert an action of the simulation to one of the agent; needed to train on recorded trajectories.

        :param maze_action: Action of the simulation.
        :return: Element of :meth:`space`, with entries `[*space.shape]`.
        :raises NotImplementedError: The conversion has no inverse.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.maze_to_space, the inverse of space_to_maze, is needed for recorded actions."
        )

    @abstractmethod
    def space(self) -> spaces.Dict:
        """Return the agent's action space."""

    def noop_action(self) -> Any:
        """Return an action of the agent that has no effect.

        :raises NotImplementedError: There is none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no noop action; implement `noop_action`.")


def uses_state(conversion: ActionConversionInterface) -> bool:
    """Return whether a conversion uses the state; a subclass with a `space_to_maze` of its own decides for itself."""
    owner = next(each for each in type(conversion).__mro__ if "space_to_maze" in vars(each))
    return bool(vars(owner).get("uses_state", True))


class DictActionConversion(ActionConversionInterface):
    """Pass actions on unchanged, entries of `Discrete` spaces as integers.

    For simulations whose actions are dictionaries.

    :param heads: Spaces of the entries, the action heads.
    """

    uses_state = False

    def __init__(self, heads: Mapping[str, spaces.Space[Any]]) -> None:
        self._space = heads if isinstance(heads, spaces.Dict) else spaces.Dict(dict(heads))

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> dict[str, Any]:
        return {
            key: int(action[key]) if isinstance(space, spaces.Discrete) else action[key]
            for key, space in self._space.items()
        }

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: dict[str, Any]) -> dict[str, Any]:
        return {key: maze_action[key] for key in self._space}

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space
