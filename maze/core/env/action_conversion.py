"""From the agent's actions to those of the simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType


class ActionConversionInterface(ABC):
    """Converts between actions of an agent (elements of a dictionary space) and actions of the simulation."""

    @abstractmethod
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> MazeActionType:
        """Converts an agent's action.

        The entries of an action have the shapes of their spaces, `[*space.shape]`.

        :param action: Element of :meth:`space`.
        :param maze_state: State in which the action is taken.
        """

    def maze_to_space(self, maze_action: MazeActionType) -> dict[str, np.ndarray]:
        """Converts an action of the simulation back; needed to train on recorded trajectories.

        :raises NotImplementedError: The conversion has no inverse.
        :return: Element of :meth:`space`, with entries `[*space.shape]`.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.maze_to_space is not implemented, but is needed to turn recorded MazeActions "
            f"into agent actions. Implement it as the inverse of `space_to_maze`."
        )

    @abstractmethod
    def space(self) -> spaces.Dict:
        """The agent's action space."""

    def noop_action(self) -> Any:
        """An agent's action that changes nothing.

        :raises NotImplementedError: There is none.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no noop action; implement `noop_action`.")
