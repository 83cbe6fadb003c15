"""The trainable environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import ObservationConversionInterface

from .core_env import HomeBatteryCoreEnv
from .state import BatteryCommand, HouseState


class BatteryActionConversion(ActionConversionInterface):
    """The agent says `battery`: 0 to discharge, 1 to leave it alone, 2 to charge.

    :param power: kWh that the battery can take or give in an hour.
    """

    def __init__(self, power: float) -> None:
        self.power = power

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, Any], maze_state: HouseState) -> BatteryCommand:
        return BatteryCommand((int(action["battery"]) - 1) * self.power)

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: BatteryCommand) -> dict[str, Any]:
        return {"battery": int(np.sign(maze_action.energy)) + 1}

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return spaces.Dict({"battery": spaces.Discrete(3)})


class HouseObservationConversion(ObservationConversionInterface):
    """The agent sees how full the battery is, the hour as a point on a circle, and price, sun and demand.

    :param capacity: Of the battery in kWh.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: HouseState) -> dict[str, np.ndarray]:
        angle = 2 * np.pi * maze_state.hour / 24
        return {
            "charge": np.array([maze_state.charge / self.capacity], np.float32),
            "hour": np.array([np.sin(angle), np.cos(angle)], np.float32),
            "market": np.array([maze_state.price, maze_state.solar, maze_state.demand], np.float32),
        }

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return spaces.Dict(
            {
                "charge": spaces.Box(0.0, 1.0, (1,), np.float32),
                "hour": spaces.Box(-1.0, 1.0, (2,), np.float32),
                "market": spaces.Box(0.0, 10.0, (3,), np.float32),
            }
        )


def home_battery_env(
    capacity: float, power: float, n_days: int, feed_in_share: float, limit_fee: float
) -> MazeEnv[HomeBatteryCoreEnv]:
    """Builds the environment, see :class:`~home_battery.env.core_env.HomeBatteryCoreEnv`."""
    return MazeEnv(
        core_env=HomeBatteryCoreEnv(capacity, power, n_days, feed_in_share, limit_fee),
        action_conversion_dict={0: BatteryActionConversion(power)},
        observation_conversion_dict={0: HouseObservationConversion(capacity)},
    )
