"""Dual sourcing: a cheap supplier who takes his time, and an express one.

In each period an express order is decided first, which arrives at once, and then a regular one, which arrives
`lead_time` periods later. Then demand occurs; what cannot be met waits (backlog). Settings of Veeraraghavan and
Scheller-Wolf (2008), Now or later: a simple policy for effective dual sourcing in capacitated systems, Operations
Research 56 (4), as used by Gijsbrechts et al. (2022), Can deep reinforcement learning improve inventory management?,
Manufacturing & Service Operations Management 24 (3).
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
from maze_envs.inventory.renderer import InventoryRenderer
from maze_envs.inventory.stores import Stores, uniform

SCALE = 5.0
"""Observed units are divided by it."""

EXPRESS, REGULAR = "express", "regular"


class DualSourcing(Stores):
    """Stores with two suppliers.

    Sub-steps `express` and `regular`, each with an action of its own name: a number of units. Both observe `stock`
    `[lead_time]`: the net stock (negative: backlog), after the express order where it is placed, and the outstanding
    regular orders, the next one first, divided by 5. Every unit of demand is bought once, whatever is done: in the long
    run only the surcharge for express orders, holding and backlog costs depend on the policy. Rewards are minus these.
    On average that is the full costs without `unavoidable`, the price of the mean demand, with less noise and delay.
    The event `cost` and KPIs are about the full costs.

    :param n_envs: Number of stores.
    :param lead_time: Periods until a regular order arrives, at least 2.
    :param regular_cost: Price of a unit of the regular supplier.
    :param express_cost: Price of a unit of the express supplier.
    :param holding_cost: Cost of a unit that is left over.
    :param backlog_cost: Cost of a unit that is owed at the end of a period.
    :param largest_demand: Demand is 0, ..., this many units, all equally likely.
    :param max_express: The largest express order.
    :param max_regular: The largest regular order.
    :param reward_scale: Rewards are divided by it.
    :param reference_cost: Subtracted from costs in rewards.
    :param warm_up: Periods of an episode that its average cost (a KPI) leaves out.
    :param max_episode_steps: Periods of an episode.
    """

    row_arrays = ("stock", "outstanding", "express", "counted_cost", "elapsed")
    scale = SCALE

    def __init__(
        self,
        n_envs: int,
        lead_time: int = 2,
        regular_cost: float = 100.0,
        express_cost: float = 105.0,
        holding_cost: float = 5.0,
        backlog_cost: float = 495.0,
        largest_demand: int = 4,
        max_express: int = 6,
        max_regular: int = 5,
        reward_scale: float = 10.0,
        reference_cost: float = 0.0,
        warm_up: int = 0,
        max_episode_steps: int = 200,
    ) -> None:
        super().__init__(
            n_envs,
            {EXPRESS: (EXPRESS, max_express), REGULAR: (REGULAR, max_regular)},
            lowest_stock=-np.inf,
            probabilities=uniform(largest_demand),
            lead_time=lead_time,
            initial_units=largest_demand // 2,
            warm_up=warm_up,
            max_episode_steps=max_episode_steps,
        )
        self.max_express, self.max_regular = max_express, max_regular
        self.regular_cost, self.express_cost = regular_cost, express_cost
        self.holding_cost, self.backlog_cost = holding_cost, backlog_cost
        self.reward_scale, self.reference_cost = reward_scale, reference_cost
        self.unavoidable = regular_cost * largest_demand / 2
        self.express = np.zeros(n_envs, np.int64)
        """The express order of the period."""

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        super().reset_rows(rows)
        self.express[rows] = 0

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        none = np.zeros(self.n_envs, np.bool_)
        if self.step_keys[self.substep] == EXPRESS:
            self.express = actions[EXPRESS].astype(np.int64)
            self.stock = self.stock + self.express
            return np.zeros(self.n_envs), none
        stock = self.stock - self.draw_demand()
        left_over, owed = np.maximum(stock, 0), np.maximum(-stock, 0)
        surcharge = (self.express_cost - self.regular_cost) * self.express
        influenced = surcharge + self.holding_cost * left_over + self.backlog_cost * owed
        cost = influenced + self.regular_cost * (self.express + actions[REGULAR])
        self.end_period(stock, actions[REGULAR], cost, owed)
        return (self.reference_cost - influenced) / self.reward_scale, none


class DualSourcingEnv(BatchedMazeEnv):
    """One store with two suppliers; see :class:`DualSourcing` for the arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(functools.partial(DualSourcing, **arguments), InventoryRenderer())


class DualIndexPolicy(ArrayPolicy):
    """Fill up the stock by express orders, and stock and outstanding orders by regular ones.

    Veeraraghavan and Scheller-Wolf (2008); with a cap, Sun and Van Mieghem (2019), Robust dual sourcing inventory
    management, Manufacturing & Service Operations Management 21 (4).

    :param express_level: Level of the stock for express orders.
    :param regular_level: Level of stock and outstanding orders for regular ones.
    :param cap: The largest regular order; `None`: any.
    """

    def __init__(self, express_level: int, regular_level: int, cap: int | None = None) -> None:
        self.express_level = express_level
        self.regular_level = regular_level
        self.cap = cap

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: object) -> dict[str, np.ndarray]:
        pipeline = np.rint(observation["stock"] * SCALE)
        if step_key == EXPRESS:
            return {EXPRESS: np.clip(self.express_level - pipeline[:, 0], 0, None).astype(np.int64)}
        return {REGULAR: np.clip(self.regular_level - pipeline.sum(axis=1), 0, self.cap).astype(np.int64)}
