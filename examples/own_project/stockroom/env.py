"""Conversion interfaces and Maze environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface

from .simulation import CHOOSE_LOTS, CHOOSE_PRODUCT, StockroomAction, StockroomCoreEnv, StockroomState


class ShelvesConversion(ObservationConversionInterface):
    """Observation of the first sub-step: stock levels, their coverage in weeks, and the weekday.

    :param core_env: The simulation; only its constants are used.
    """

    def __init__(self, core_env: StockroomCoreEnv) -> None:
        self.shelf, self.mean_demand = core_env.shelf, core_env.mean_demand
        self.lot, self.max_lots = core_env.lot, core_env.max_lots

    def maze_to_space(self, maze_state: StockroomState) -> dict[str, np.ndarray]:
        weeks = maze_state.stock / self.mean_demand / 7.0
        return {
            "filled": (maze_state.stock / self.shelf).astype(np.float32),
            "weeks_left": weeks.astype(np.float32),
            "weekday": np.asarray(maze_state.day % 7, np.int64),
        }

    def space(self) -> spaces.Dict:
        size = (len(self.mean_demand),)
        return spaces.Dict(
            filled=spaces.Box(0.0, 1.0, size, np.float32),
            weeks_left=spaces.Box(0.0, np.inf, size, np.float32),
            weekday=spaces.Discrete(7),
        )


class LotsConversion(ShelvesConversion):
    """Observation of the second sub-step: additionally the product, and the number of lots that fit on its shelf.

    An entry that ends with `_mask` marks the allowed values of the action of that name.
    """

    def maze_to_space(self, maze_state: StockroomState) -> dict[str, np.ndarray]:
        product = maze_state.product or 0
        fits = maze_state.stock[product] + self.lot * np.arange(self.max_lots + 1) <= self.shelf
        return {
            **super().maze_to_space(maze_state),
            "product": np.asarray(product, np.int64),
            "lots_mask": fits.astype(np.int8),
        }

    def space(self) -> spaces.Dict:
        chosen = {"product": spaces.Discrete(len(self.mean_demand)), "lots_mask": spaces.MultiBinary(self.max_lots + 1)}
        return spaces.Dict({**super().space().spaces, **chosen})


class NumberConversion(ActionConversionInterface):
    """Selection of a number.

    :param name: Name of the action.
    :param n: Number of choices.
    """

    def __init__(self, name: str, n: int) -> None:
        self.name, self.n = name, n

    def space_to_maze(self, action: dict[str, Any], maze_state: StockroomState) -> StockroomAction:
        return StockroomAction(int(action[self.name]))

    def maze_to_space(self, maze_action: StockroomAction) -> dict[str, Any]:
        return {self.name: np.asarray(maze_action.number, np.int64)}

    def space(self) -> spaces.Dict:
        return spaces.Dict({self.name: spaces.Discrete(self.n)})


class StockroomEnv(MazeEnv[StockroomCoreEnv]):
    """The simulation with conversions for each sub-step.

    :param arguments: Those of :class:`StockroomCoreEnv`.
    """

    def __init__(self, **arguments: Any) -> None:
        core_env = StockroomCoreEnv(**arguments)
        super().__init__(
            core_env,
            action_conversion_dict={
                CHOOSE_PRODUCT: NumberConversion("product", len(core_env.mean_demand)),
                CHOOSE_LOTS: NumberConversion("lots", core_env.max_lots + 1),
            },
            observation_conversion_dict={
                CHOOSE_PRODUCT: ShelvesConversion(core_env),
                CHOOSE_LOTS: LotsConversion(core_env),
            },
        )
