"""Lost sales with a lead time: what arrives late, and what nobody waits for.

In each period an order of up to `max_order` units is placed, which arrives `lead_time` periods later; then demand
occurs, and what stock cannot meet is lost. A unit left over costs `holding_cost`, a lost one `penalty`. The test bed of
Zipkin (2008), Old and new methods for lost-sales inventory systems, Operations Research 56 (5): holding cost 1, penalty
4, 9, 19 or 39, lead time 1 to 4, Poisson or geometric demand of mean 5; what counts is the average cost of a period.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.inventory.demand import distribution
from maze_envs.inventory.events import InventoryEvents
from maze_envs.inventory.renderer import InventoryRenderer

SCALE = 10.0
"""Observed units are divided by it."""


class LostSales(BatchedCoreEnv):
    """Stores with lost sales.

    Observed is `stock` `[lead_time]`: the stock after today's delivery and the outstanding orders, the next one first,
    divided by 10. The action `order` is a number of units. The reward of a period is its negative cost, above
    `reference_cost` where one is given, divided by `reward_scale`.

    :param n_envs: Number of stores.
    :param demand: `poisson` or `geometric`.
    :param mean_demand: Its mean.
    :param lead_time: Periods from order to delivery, at least 1.
    :param holding_cost: Cost of a unit that is left over.
    :param penalty: Cost of a unit that is lost.
    :param max_order: The largest order.
    :param reward_scale: Rewards are divided by it.
    :param reference_cost: Subtracted from costs in rewards.
    :param warm_up: Periods of an episode that its average cost (a KPI) leaves out.
    :param max_episode_steps: Periods of an episode.
    """

    row_arrays = ("stock", "outstanding", "counted_cost", "elapsed")
    event_interfaces = (InventoryEvents,)

    def __init__(
        self,
        n_envs: int,
        demand: str = "poisson",
        mean_demand: float = 5.0,
        lead_time: int = 4,
        holding_cost: float = 1.0,
        penalty: float = 4.0,
        max_order: int = 20,
        reward_scale: float = 1.0,
        reference_cost: float = 0.0,
        warm_up: int = 0,
        max_episode_steps: int = 200,
    ) -> None:
        seen = spaces.Dict(stock=spaces.Box(0.0, np.inf, (lead_time,), np.float32))
        super().__init__(n_envs, {0: spaces.Dict(order=spaces.Discrete(max_order + 1))}, {0: seen}, max_episode_steps)
        self.probabilities = distribution(demand, mean_demand)
        self._cumulative = np.cumsum(self.probabilities)
        self.lead_time, self.max_order = lead_time, max_order
        self.holding_cost, self.penalty = holding_cost, penalty
        self.reward_scale, self.reference_cost, self.warm_up = reward_scale, reference_cost, warm_up
        self.mean_demand = mean_demand
        self.stock = np.zeros(n_envs, np.int64)
        self.outstanding = np.zeros((n_envs, lead_time - 1), np.int64)
        """Orders that have not arrived, the next one first."""
        self.counted_cost = np.zeros(n_envs)

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        """Begins with the mean demand in stock and under way."""
        self.stock[rows] = round(self.mean_demand)
        self.outstanding[rows] = round(self.mean_demand)
        self.counted_cost[rows] = 0.0

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        demand = np.minimum(np.searchsorted(self._cumulative, self.random.uniform()), len(self.probabilities) - 1)
        left_over = np.maximum(self.stock - demand, 0)
        lost = np.maximum(demand - self.stock, 0)
        cost = self.holding_cost * left_over + self.penalty * lost
        self.counted_cost += np.where(self.elapsed >= self.warm_up, cost, 0.0)
        pipeline = np.concatenate([self.outstanding, actions["order"][:, None]], axis=1)
        self.stock = left_over + pipeline[:, 0]
        self.outstanding = pipeline[:, 1:]
        self.fire(InventoryEvents.cost, value=cost)
        self.fire(InventoryEvents.short, units=lost)
        self.fire(InventoryEvents.left_over, units=left_over)
        return (self.reference_cost - cost) / self.reward_scale, np.zeros(self.n_envs, np.bool_)

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        out["stock"][:, 0] = self.stock / SCALE
        out["stock"][:, 1:] = self.outstanding / SCALE

    @override(BatchedCoreEnv)
    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {"average_cost": self.counted_cost[rows] / np.maximum(self.elapsed[rows] - self.warm_up, 1)}


class LostSalesEnv(BatchedMazeEnv):
    """One store with lost sales; see :class:`LostSales` for the arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(functools.partial(LostSales, **arguments), InventoryRenderer())


class BaseStockPolicy(ArrayPolicy):
    """Orders up to a level, no more than a cap at a time.

    Xin (2021), Understanding the performance of capped base-stock policies in lost-sales inventory models, Operations
    Research 69 (1).

    :param level: What stock and outstanding orders are filled up to.
    :param cap: The largest order; `None`: any.
    """

    def __init__(self, level: int, cap: int | None = None) -> None:
        self.level = level
        self.cap = cap

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: object) -> dict[str, np.ndarray]:
        position = np.rint(observation["stock"] * SCALE).sum(axis=1)
        return {"order": np.clip(self.level - position, 0, self.cap).astype(np.int64)}
