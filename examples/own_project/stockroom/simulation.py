"""The simulation."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.core_env import CoreEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.events.pubsub import Pubsub
from maze.core.rendering.renderer import Renderer

from .events import StockroomEvents, StockroomKpis
from .renderer import StockroomRenderer

CHOOSE_PRODUCT, CHOOSE_LOTS = "product", "lots"
"""The sub-steps of a day."""
WEEKEND, WEEKEND_FACTOR = (5, 6), 1.6


class StockroomState(NamedTuple):
    """State at the beginning of a sub-step."""

    day: int
    """Since the episode began, on a Monday."""
    stock: np.ndarray
    """Units of each product."""
    product: int | None
    """What is to be delivered; `None`: that is to be decided."""


class StockroomAction(NamedTuple):
    """Action of a sub-step."""

    number: int
    """Of the product, or of its lots."""


class StockroomCoreEnv(CoreEnv):
    """Each morning one product may be delivered, in lots. Then customers come.

    A day has two sub-steps: which product, and how many lots of it. The arguments are explained in
    `conf/env/stockroom.yaml`.
    """

    def __init__(
        self,
        mean_demand: Sequence[float],
        shelf: int,
        lot: int,
        max_lots: int,
        n_days: int,
        margin: float,
        penalty: float,
        delivery_fee: float,
        holding_cost: float,
    ) -> None:
        super().__init__()
        for name, value in {"shelf": shelf, "lot": lot, "max_lots": max_lots, "n_days": n_days}.items():
            if value < 1:
                raise ConfigError(f"env.{name}: expected at least 1, found {value}.")
        self.mean_demand = np.asarray(mean_demand, np.float64)
        self.shelf, self.lot, self.max_lots, self.n_days = shelf, lot, max_lots, n_days
        self.margin, self.penalty, self.delivery_fee, self.holding_cost = margin, penalty, delivery_fee, holding_cost
        self.events = Pubsub(self.context.event_service).create_event_topic(StockroomEvents)
        self.kpi_calculator, self.renderer = StockroomKpis(), StockroomRenderer(shelf)
        self.rng = np.random.default_rng()
        self._begin()

    def _begin(self) -> None:
        self.day, self.product = 0, None
        self.stock = self.rng.integers(self.shelf // 2, self.shelf + 1, size=len(self.mean_demand))

    def seed(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    def reset(self) -> StockroomState:
        self._begin()
        return self.get_maze_state()

    def step(self, maze_action: StockroomAction) -> tuple[StockroomState, float, bool, dict[Any, Any]]:
        if self.product is None:
            self.product = maze_action.number
            return self.get_maze_state(), 0.0, False, {}
        profit = self._sell(cost=self._deliver(self.product, maze_action.number * self.lot))
        self.product = None
        self.day += 1
        return self.get_maze_state(), profit / 10.0, self.day == self.n_days, {}

    def _deliver(self, product: int, ordered: int) -> float:
        """Add a delivery to its shelf and return its cost."""
        if ordered == 0:
            return 0.0
        units = min(ordered, int(self.shelf - self.stock[product]))
        if units < ordered:
            self.events.invalid_order(product=product, units=ordered - units)
        self.stock[product] += units
        self.events.delivered(product=product, units=units)
        return self.delivery_fee

    def _sell(self, cost: float) -> float:
        """Simulate the customers of a day and return the profit, less the cost of the delivery."""
        demand = self.rng.poisson(self.mean_demand * (WEEKEND_FACTOR if self.day % 7 in WEEKEND else 1.0))
        sold = np.minimum(demand, self.stock)
        lost = int((demand - sold).sum())
        self.stock = self.stock - sold
        cost += self.penalty * lost + self.holding_cost * int(self.stock.sum())
        profit = self.margin * int(sold.sum()) - cost
        self.events.day_over(sold=int(sold.sum()), lost=lost, profit=profit)
        return profit

    def get_maze_state(self) -> StockroomState:
        return StockroomState(self.day, self.stock.copy(), self.product)

    def actor_id(self) -> ActorID:
        return ActorID(CHOOSE_PRODUCT if self.product is None else CHOOSE_LOTS, 0)

    @property
    def agent_counts_dict(self) -> dict[str | int, int]:
        return {CHOOSE_PRODUCT: 1, CHOOSE_LOTS: 1}

    def get_kpi_calculator(self) -> StockroomKpis:
        return self.kpi_calculator

    def get_renderer(self) -> Renderer:
        return self.renderer

    def clone_from(self, env: CoreEnv) -> None:
        assert isinstance(env, StockroomCoreEnv)
        self.day, self.product, self.stock = env.day, env.product, env.stock.copy()
        self.rng = copy.deepcopy(env.rng)
