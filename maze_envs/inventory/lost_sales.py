"""Lost sales with a lead time: demand that exceeds the stock is lost.

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

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.inventory.demand import distribution
from maze_envs.inventory.renderer import InventoryRenderer
from maze_envs.inventory.stores import Stores

SCALE = 10.0
"""Observed units are divided by it."""


class LostSales(Stores):
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
    :param expected_costs: Rewards have what a period is expected to cost with its stock, not what it came to: the same
        on average, with less noise. Events and KPIs tell what it came to.
    :param warm_up: Periods of an episode that its average cost (a KPI) leaves out.
    :param max_episode_steps: Periods of an episode.
    """

    scale = SCALE

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
        expected_costs: bool = False,
        warm_up: int = 0,
        max_episode_steps: int = 200,
    ) -> None:
        super().__init__(
            n_envs,
            {0: ("order", max_order)},
            lowest_stock=0.0,
            probabilities=distribution(demand, mean_demand),
            lead_time=lead_time,
            initial_units=round(mean_demand),
            warm_up=warm_up,
            max_episode_steps=max_episode_steps,
        )
        self.mean_demand, self.max_order = mean_demand, max_order
        self.holding_cost, self.penalty = holding_cost, penalty
        self.reward_scale, self.reference_cost = reward_scale, reference_cost
        self.expected_costs = expected_costs
        short = np.cumsum(np.append(1.0 - self._cumulative, 0.0)[::-1])[::-1]
        self._expected_lost = np.maximum(short, 0.0)
        """Units that are lost on average, by the stock that there is: the sum of the probabilities of more demand."""
        self._mean_drawn = float(self.probabilities @ np.arange(len(self.probabilities)))

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        demand = self.draw_demand()
        left_over, lost = np.maximum(self.stock - demand, 0), np.maximum(demand - self.stock, 0)
        cost = self.holding_cost * left_over + self.penalty * lost
        rewarded = self._expected_cost() if self.expected_costs else cost
        self.end_period(left_over, actions["order"], cost, lost)
        return (self.reference_cost - rewarded) / self.reward_scale, np.zeros(self.n_envs, np.bool_)

    def _expected_cost(self) -> np.ndarray:
        lost = self._expected_lost[np.minimum(self.stock, len(self._expected_lost) - 1)]
        return np.asarray(self.holding_cost * (self.stock - self._mean_drawn + lost) + self.penalty * lost)


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
