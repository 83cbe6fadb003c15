"""Base of inventories: demand, a stock, orders on their way, an average cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze_envs.inventory.events import InventoryEvents

_TAIL = 1e-10
"""Probability of demands that are left out."""
_LARGEST_EXPONENT = 600.0


class Stores(BatchedCoreEnv):
    """Stores that observe `stock` `[lead_time]`: the stock, and the outstanding orders, the next one first.

    :param n_envs: Number of stores.
    :param largest_orders: By sub-step the action's name and its largest number of units.
    :param lowest_stock: What is observed of the stock is at least this.
    :param probabilities: Of a demand of 0, 1, ... units; several distributions `[n_distributions, n_demands]` for
        :meth:`distributions`.
    :param lead_time: Periods from order to delivery, at most; see :meth:`lead_times`.
    :param initial_units: An episode begins with so many units in stock, and in each outstanding order.
    :param warm_up: Periods of an episode that its average cost (a KPI) leaves out.
    :param max_episode_steps: Periods of an episode.
    """

    row_arrays: ClassVar[tuple[str, ...]] = ("stock", "outstanding", "counted_cost", "elapsed")
    event_interfaces = (InventoryEvents,)
    scale: ClassVar[float] = 1.0
    """Observed units are divided by it."""

    def __init__(
        self,
        n_envs: int,
        largest_orders: Mapping[StepKeyType, tuple[str, int]],
        lowest_stock: float,
        probabilities: np.ndarray,
        lead_time: int,
        initial_units: int,
        warm_up: int,
        max_episode_steps: int | None,
    ) -> None:
        if lead_time < 1:
            raise ConfigError(f"env.lead_time: expected at least 1, found {lead_time}.")
        seen = spaces.Dict(stock=spaces.Box(lowest_stock, np.inf, (lead_time,), np.float32))
        orders = {
            key: spaces.Dict({name: spaces.Discrete(largest + 1)}) for key, (name, largest) in largest_orders.items()
        }
        super().__init__(n_envs, orders, dict.fromkeys(orders, seen), max_episode_steps)
        self.probabilities = probabilities
        self._cumulative = np.cumsum(np.atleast_2d(probabilities), axis=1)
        self.lead_time, self.warm_up, self._initial_units = lead_time, warm_up, initial_units
        self.stock = np.zeros(n_envs, np.int64)
        self.outstanding = np.zeros((n_envs, lead_time - 1), np.int64)
        """Orders that have not arrived, the next one first."""
        self.counted_cost = np.zeros(n_envs)

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        self.stock[rows] = self.outstanding[rows] = self._initial_units
        self.counted_cost[rows] = 0.0
        if (lead_times := self.lead_times()) is not None:
            self.outstanding[rows] *= np.arange(1, self.lead_time) < lead_times[rows, None]

    def distributions(self) -> np.ndarray | None:
        """Return the index of each store's demand distribution, `[n_envs]`; `None`: there is one only."""
        return None

    def lead_times(self) -> np.ndarray | None:
        """Return each store's lead time, `[n_envs]`; `None`: the longest one for all."""
        return None

    def draw_demand(self) -> np.ndarray:
        """Return the demand of the period, `[n_envs]`."""
        numbers, last = self.random.uniform(), self._cumulative.shape[1] - 1
        if (distributions := self.distributions()) is None:
            demand = np.searchsorted(self._cumulative[0], numbers)
        else:
            demand = np.choose(distributions, [np.searchsorted(each, numbers) for each in self._cumulative])
        return np.asarray(np.minimum(demand, last))

    def end_period(self, stock: np.ndarray, order: np.ndarray, cost: np.ndarray, short: np.ndarray) -> None:
        """Count what the period cost, and have the next order arrive.

        :param stock: What is left, `[n_envs]` as all others; negative: owed.
        :param order: What was ordered, to arrive `lead_time` periods later.
        :param cost: What the period cost.
        :param short: Demand that could not be met.
        """
        self.counted_cost += np.where(self.elapsed >= self.warm_up, cost, 0.0)
        pipeline = np.concatenate([self.outstanding, order[:, None]], axis=1)
        if (lead_times := self.lead_times()) is not None:
            pipeline[:, -1] = 0
            pipeline[np.arange(self.n_envs), lead_times - 1] += order
        self.stock, self.outstanding = stock + pipeline[:, 0], pipeline[:, 1:]
        self.fire(InventoryEvents.cost, value=cost)
        self.fire(InventoryEvents.short, units=short)
        self.fire(InventoryEvents.left_over, units=np.maximum(stock, 0))

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        out["stock"][:, 0] = self.stock / self.scale
        out["stock"][:, 1:] = self.outstanding / self.scale
        super().observe(out)

    @override(BatchedCoreEnv)
    def kpis(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        average_cost = self.counted_cost[rows] / np.maximum(self.elapsed[rows] - self.warm_up, 1)
        return {"average_cost": average_cost, **super().kpis(rows)}


# -- distributions of the demand of a period ---------------------------------------------------------------------------


def poisson(mean: float) -> np.ndarray:
    """Return probabilities of 0, 1, 2, ... under a Poisson distribution, cut off where 1e-10 is left.

    :param mean: The mean demand.
    """
    if mean > _LARGEST_EXPONENT:  # here the probability of 0 is no number above 0
        demands = np.arange(int(mean + 10.0 * np.sqrt(mean)))
        logs = demands * np.log(mean) - mean - np.cumsum(np.log(np.maximum(demands, 1)))
        found = np.exp(logs)
        found = found[: int(np.searchsorted(np.cumsum(found), 1.0 - _TAIL)) + 1]
        return np.asarray(found / found.sum())
    probabilities = [np.exp(-mean)]
    while 1.0 - sum(probabilities) > _TAIL:
        probabilities.append(probabilities[-1] * mean / len(probabilities))
    return np.array(probabilities) / sum(probabilities)


def geometric(mean: float) -> np.ndarray:
    """Return probabilities of 0, 1, 2, ... under a geometric distribution, cut off where 1e-10 is left.

    :param mean: The mean demand.
    """
    ratio = mean / (1.0 + mean)
    n_values = int(np.ceil(np.log(_TAIL) / np.log(ratio))) if ratio else 1
    probabilities = (1.0 - ratio) * ratio ** np.arange(n_values)
    return np.asarray(probabilities / probabilities.sum())


def uniform(largest: int) -> np.ndarray:
    """Return probabilities of 0, ..., `largest`, all the same."""
    return np.full(largest + 1, 1.0 / (largest + 1))


def with_surges(probabilities: np.ndarray, probability: float, units: int) -> np.ndarray:
    """Return the distribution of a demand that is larger in rare periods.

    :param probabilities: Distribution in other periods.
    :param probability: Probability of a surge in a period.
    :param units: Units by which a surge increases the demand.
    """
    usual = np.pad(probabilities, (0, units))
    return (1.0 - probability) * usual + probability * np.roll(usual, units)


def distribution(name: str, mean: float) -> np.ndarray:
    """Return a demand distribution by its name.

    :param name: `poisson` or `geometric`.
    :param mean: The mean demand.
    :raises ConfigError: There is none of that name, or the mean is negative or not finite.
    """
    known = {"poisson": poisson, "geometric": geometric}
    if name not in known:
        raise ConfigError(f"env.demand: expected one of {', '.join(known)}, found {name!r}.")
    if not 0.0 <= mean < np.inf:
        raise ConfigError(f"env.mean_demand: expected a finite number of at least 0, found {mean}.")
    return known[name](mean)
