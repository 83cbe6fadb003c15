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
from maze.core.env.context import CONTEXT, Context, InstanceSource
from maze.core.errors import ConfigError
from maze_envs.common.array_policy import ArrayPolicy
from maze_envs.inventory.renderer import InventoryRenderer
from maze_envs.inventory.stores import Stores, distribution, with_surges

SCALE = 10.0
"""Observed units are divided by it."""

NEWSVENDOR = "newsvendor"
"""Value of `reward_scale`."""


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
    :param reward_scale: Rewards are divided by it; `newsvendor`: by the least expected cost of a period without lead
        time, which is then subtracted as well: settings of a context get rewards of similar size.
    :param reference_cost: Subtracted from costs in rewards.
    :param expected_costs: Rewards are expected costs of a period given its stock instead of realised ones: the same
        mean with less noise. Events and KPIs report realised costs.
    :param warm_up: Periods of an episode that its average cost (a KPI) leaves out.
    :param max_episode_steps: Periods of an episode.
    :param surge_probability: Probability of a surge of the demand in a period.
    :param surge_units: Units by which a surge increases the demand.
    :param context: Values of `demand`, `lead_time`, `holding_cost` and `penalty` that are drawn for each episode, see
        :class:`~maze.core.env.context.Context`. `stock` has room for the longest lead time.
    :param instances: Contexts that are played in order; `grid`: all combinations.
    """

    scale = SCALE
    row_arrays = (*Stores.row_arrays, "newsvendor_cost")
    context_parameters = ("demand", "lead_time", "holding_cost", "penalty")

    def __init__(
        self,
        n_envs: int,
        demand: str = "poisson",
        mean_demand: float = 5.0,
        lead_time: int = 4,
        holding_cost: float = 1.0,
        penalty: float = 4.0,
        max_order: int = 20,
        reward_scale: float | str = 1.0,
        reference_cost: float = 0.0,
        expected_costs: bool = False,
        warm_up: int = 0,
        max_episode_steps: int = 200,
        surge_probability: float = 0.0,
        surge_units: int = 0,
        context: Mapping[str, Any] | None = None,
        instances: InstanceSource | None = None,
    ) -> None:
        drawn = _context(context)
        if "lead_time" in drawn.names:
            lead_time = max(lead_time, int(drawn["lead_time"].upper))
        demands = drawn["demand"].values if "demand" in drawn.names else [demand]
        usual = [distribution(name, mean_demand) for name in demands]
        probabilities = [with_surges(each, surge_probability, surge_units) for each in usual]
        longest = max(map(len, probabilities))
        padded = np.array([np.pad(each, (0, longest - len(each))) for each in probabilities])
        super().__init__(
            n_envs,
            {0: ("order", max_order)},
            lowest_stock=0.0,
            probabilities=padded if len(padded) > 1 else padded[0],
            lead_time=lead_time,
            initial_units=round(mean_demand),
            warm_up=warm_up,
            max_episode_steps=max_episode_steps,
        )
        self.mean_demand, self.max_order = mean_demand, max_order
        self.holding_cost, self.penalty = holding_cost, penalty
        if isinstance(reward_scale, str) and reward_scale != NEWSVENDOR:
            raise ConfigError(f"env.reward_scale: expected a number or {NEWSVENDOR}, found {reward_scale!r}.")
        self.reward_scale, self.reference_cost = reward_scale, reference_cost
        self.expected_costs = expected_costs
        short = np.cumsum(np.flip(np.pad(1.0 - self._cumulative, ((0, 0), (0, 1))), axis=1), axis=1)
        self._expected_lost = np.maximum(np.flip(short, axis=1), 0.0)
        """Units that are lost on average, by distribution and stock: the sum of the probabilities of more demand."""
        self._mean_drawn = np.atleast_1d(self.probabilities @ np.arange(longest))
        self.newsvendor_cost = np.ones(n_envs)
        """Least expected cost of a period without lead time in the running episodes; 1 if rewards do not need it."""
        self.use_context(context, instances)

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        super().reset_rows(rows)
        if self.reward_scale == NEWSVENDOR:
            self.newsvendor_cost[rows] = costs = self._newsvendor_cost()[rows]
            if not costs.all():
                raise ConfigError(
                    f"env.reward_scale: {NEWSVENDOR} divides rewards by the least expected cost of a period, which is "
                    "0 because the demand does not vary. Set a number."
                )

    @override(Stores)
    def distributions(self) -> np.ndarray | None:
        demands = self.parameter("demand")
        return None if demands is None else demands.astype(np.int64)

    @override(Stores)
    def lead_times(self) -> np.ndarray | None:
        lead_times = self.parameter("lead_time")
        return None if lead_times is None else lead_times.astype(np.int64)

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        demand = self.draw_demand()
        left_over, lost = np.maximum(self.stock - demand, 0), np.maximum(demand - self.stock, 0)
        holding_cost, penalty = self._costs()
        cost = holding_cost * left_over + penalty * lost
        rewarded = self._expected_cost(self.stock) if self.expected_costs else cost
        self.end_period(left_over, actions["order"], cost, lost)
        if isinstance(self.reward_scale, str):
            reward = 1.0 - rewarded / self.newsvendor_cost
        else:
            reward = (self.reference_cost - rewarded) / self.reward_scale
        return reward, np.zeros(self.n_envs, np.bool_)

    def _costs(self) -> tuple[np.ndarray | float, np.ndarray | float]:
        holding_cost, penalty = self.parameter("holding_cost"), self.parameter("penalty")
        return (
            self.holding_cost if holding_cost is None else holding_cost,
            self.penalty if penalty is None else penalty,
        )

    def _expected_cost(self, stock: np.ndarray) -> np.ndarray:
        holding_cost, penalty = self._costs()
        distributions = self.distributions()
        at = 0 if distributions is None else distributions
        lost = self._expected_lost[at, np.minimum(stock, self._expected_lost.shape[1] - 1)]
        return np.asarray(holding_cost * (stock - self._mean_drawn[at] + lost) + penalty * lost)

    def _newsvendor_cost(self) -> np.ndarray:
        holding_cost, penalty = self._costs()
        distributions = self.distributions()
        cumulative = self._cumulative[np.zeros(self.n_envs, np.int64) if distributions is None else distributions]
        with np.errstate(invalid="ignore"):  # both are zero in stores whose first episode has not begun
            enough = np.broadcast_to(penalty / (penalty + holding_cost), self.n_envs)
        return self._expected_cost((cumulative < enough[:, None]).sum(axis=1))


def _context(parameters: Mapping[str, Any] | None) -> Context:
    """Return the context of lost sales.

    :raises ConfigError: A parameter is unknown, or its values are not values of the parameter.
    """
    context = Context(parameters or {}, LostSales.context_parameters)
    for parameter in context.parameters:
        if parameter.name == "demand":
            fits, expected = parameter.is_text, "a list of texts"
        elif parameter.name == "lead_time":
            fits, expected = parameter.is_whole and parameter.lower >= 1, "whole numbers of at least 1"
        else:
            fits, expected = not parameter.is_text and parameter.lower > 0, "numbers above 0"
        if not fits:
            raise ConfigError(f"env.context.{parameter.name}: expected {expected}, found {parameter.given}.")
    return context


class LostSalesEnv(BatchedMazeEnv):
    """One store with lost sales; see :class:`LostSales` for the arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(functools.partial(LostSales, **arguments), InventoryRenderer())


class BaseStockPolicy(ArrayPolicy):
    """Order up to a level, no more than a cap at a time.

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


class ContextBaseStockPolicy(ArrayPolicy):
    """Order up to a level that follows from the context.

    The level is the quantile penalty / (penalty + holding cost) of the demand during lead time and review period: the
    optimum if unmet demand were backordered (Zipkin 2000, Foundations of Inventory Management, chapter 6).

    :param context: The context of the environment.
    :param demand: As for :class:`LostSales`, like the following ones.
    :param mean_demand: Mean demand.
    :param lead_time: Lead time if it is not part of the context.
    :param holding_cost: Holding cost if it is not part of the context.
    :param penalty: Penalty if it is not part of the context.
    :param cap: The largest order; `None`: any.
    """

    def __init__(
        self,
        context: Mapping[str, Any] | None,
        demand: str = "poisson",
        mean_demand: float = 5.0,
        lead_time: int = 4,
        holding_cost: float = 1.0,
        penalty: float = 4.0,
        cap: int | None = None,
    ) -> None:
        self._context = _context(context)
        if not self._context.names:
            raise ConfigError(
                "env.context: expected the parameters that the base-stock level follows from, found none."
            )
        self._mean_demand, self._cap = mean_demand, cap
        self._constants: dict[str, Any] = {
            "demand": demand,
            "lead_time": lead_time,
            "holding_cost": holding_cost,
            "penalty": penalty,
        }
        self._level = functools.lru_cache(maxsize=4096)(self._level_of)

    def _level_of(self, *stored: float) -> int:
        values = self._constants | dict(zip(self._context.names, stored, strict=True))
        if "demand" in self._context.names:
            values["demand"] = self._context["demand"].values[int(values["demand"])]
        of_period = distribution(values["demand"], self._mean_demand)
        demand = functools.reduce(np.convolve, [of_period] * (int(values["lead_time"]) + 1))
        enough = values["penalty"] / (values["penalty"] + values["holding_cost"])
        return int(np.searchsorted(np.cumsum(demand), enough))

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: object) -> dict[str, np.ndarray]:
        contexts, rows = np.unique(observation[CONTEXT], axis=0, return_inverse=True)
        levels = np.array([self._level(*stored) for stored in self._context.stored(contexts).tolist()])[rows.ravel()]
        position = np.rint(observation["stock"] * SCALE).sum(axis=1)
        return {"order": np.clip(levels - position, 0, self._cap).astype(np.int64)}
