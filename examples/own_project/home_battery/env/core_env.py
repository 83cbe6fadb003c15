"""The simulation."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.errors import ConfigError
from maze.core.events.pubsub import Pubsub
from maze.core.rendering.renderer import Renderer

from .events import BatteryEvents
from .kpi_calculator import BatteryKpiCalculator
from .renderer import HouseRenderer
from .state import BatteryCommand, HouseState

HOURS_PER_DAY = 24
_PRICES = (
    np.array([22, 20, 19, 18, 19, 22, 28, 34, 36, 31, 26, 23, 21, 20, 21, 24, 29, 36, 42, 44, 40, 34, 28, 24]) / 100
)
_SUN = np.clip(np.sin(np.pi * (np.arange(HOURS_PER_DAY) - 5.5) / 13), 0, None)
_DEMAND = np.array([3, 3, 3, 3, 3, 4, 7, 9, 8, 6, 5, 6, 8, 7, 6, 6, 7, 10, 14, 15, 13, 10, 7, 4]) / 10


class HomeBatteryCoreEnv(CoreEnv):
    """A house with a solar roof and a battery; in every hour the battery may be charged, left alone or discharged.

    What the house needs beyond roof and battery is bought at the hour's price; what is left over is sold for a part of
    it. Weather, prices and demand differ from day to day. The reward is what the battery saves,
    less a fee for each order that it cannot follow.

    :param capacity: Of the battery in kWh.
    :param power: kWh that it can take or give in an hour.
    :param n_days: Length of an episode.
    :param feed_in_share: Part of the price that is paid for energy sold.
    :param limit_fee: EUR for being told to charge a full battery or to discharge an empty one.
    """

    def __init__(self, capacity: float, power: float, n_days: int, feed_in_share: float, limit_fee: float) -> None:
        super().__init__()
        for name, value in (("capacity", capacity), ("power", power), ("n_days", n_days)):
            if value <= 0:
                raise ConfigError(f"env.{name}: expected a number above 0, got {value!r}.")
        if not 0.0 <= feed_in_share <= 1.0:
            raise ConfigError(f"env.feed_in_share: expected a number from 0 to 1, got {feed_in_share!r}.")
        self.capacity = capacity
        self.power = power
        self.n_hours = n_days * HOURS_PER_DAY
        self.feed_in_share = feed_in_share
        self.limit_fee = limit_fee
        self.renderer = HouseRenderer(capacity)
        self.kpi_calculator = BatteryKpiCalculator()
        self.events = Pubsub(self.context.event_service).create_event_topic(BatteryEvents)
        self.rng = np.random.default_rng()
        self._begin()

    def _begin(self) -> None:
        self.hour, self.charge = 0, self.capacity / 2
        self._begin_day()

    def _begin_day(self) -> None:
        """Draws prices, weather and demand of the next 24 hours."""
        self.prices = _PRICES * self.rng.uniform(0.7, 1.4) * self.rng.uniform(0.9, 1.1, HOURS_PER_DAY)
        self.solar = 4.0 * _SUN * self.rng.uniform(0.1, 1.0)
        self.demand = _DEMAND * self.rng.uniform(0.7, 1.3, HOURS_PER_DAY)

    @override(CoreEnv)
    def step(self, maze_action: BatteryCommand) -> tuple[HouseState, float, bool, dict[Any, Any]]:
        state = self.get_maze_state()
        wanted = float(np.clip(maze_action.energy, -self.power, self.power))
        done = float(np.clip(wanted, -self.charge, self.capacity - self.charge))
        fee = 0.0
        if done != wanted:
            self.events.limit_hit(wanted=wanted, done=done)
            fee = self.limit_fee
        self.charge += done
        cost, without = self._bill(state, done), self._bill(state, 0.0)
        self.events.hour_billed(cost=cost, cost_without_battery=without)
        self.hour += 1
        if self.hour % HOURS_PER_DAY == 0:
            self._begin_day()
        return self.get_maze_state(), without - cost - fee, self.hour == self.n_hours, {}

    def _bill(self, state: HouseState, charged: float) -> float:
        bought = state.demand - state.solar + charged
        return bought * state.price * (1.0 if bought > 0 else self.feed_in_share)

    @override(CoreEnv)
    def get_maze_state(self) -> HouseState:
        hour = self.hour % HOURS_PER_DAY
        return HouseState(
            self.hour, self.charge, float(self.prices[hour]), float(self.solar[hour]), float(self.demand[hour])
        )

    @override(CoreEnv)
    def reset(self) -> HouseState:
        self._begin()
        return self.get_maze_state()

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    @override(CoreEnv)
    def get_kpi_calculator(self) -> BatteryKpiCalculator:
        return self.kpi_calculator

    @override(CoreEnv)
    def get_renderer(self) -> Renderer:
        return self.renderer
