"""Exact average costs of the inventory problems, by relative value iteration on truncated states.

The value of a state is computed for all states at once, as matrix products with the distribution of what is left after
the demand; the bounds of Odoni (1969) say how far the iteration is from the average cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from maze_envs.inventory.dual_sourcing import DualSourcing
from maze_envs.inventory.lost_sales import LostSales


class AverageCost(NamedTuple):
    """Long-run average cost of a period.

    :param cost: Middle of the bounds.
    :param error: Half their distance.
    :param orders: By state the order that is best, or that the policy gives; `[stock, outstanding...]`.
    """

    cost: float
    error: float
    orders: np.ndarray


def lost_sales_cost(
    problem: LostSales,
    policy: Callable[[np.ndarray], np.ndarray] | None = None,
    tolerance: float = 1e-4,
    largest_order: int | None = None,
) -> AverageCost:
    """Average cost of the best policy, or of a given one.

    :param problem: The problem; of any number of stores.
    :param policy: Gets states `[n, lead_time]` (stock, then outstanding orders, in units), gives orders `[n]`; `None`:
        the best one.
    :param tolerance: The bounds are at most this far apart.
    :param largest_order: Orders above are not considered; `None`: the problem's largest one.
    """
    n_orders = 1 + (problem.max_order if largest_order is None else largest_order)
    lead_time = problem.lead_time
    demand = problem.probabilities
    n_stock = len(demand) + 5 * lead_time
    stock = np.arange(n_stock)
    left = np.maximum(stock[:, None] - np.arange(len(demand)), 0)
    to_left = np.zeros((n_stock, n_stock))
    np.add.at(to_left, (np.repeat(stock, len(demand)), left.ravel()), np.tile(demand, n_stock))
    short = np.maximum(np.arange(len(demand)) - stock[:, None], 0)
    cost = (problem.holding_cost * left + problem.penalty * short) @ demand
    arriving = np.minimum(stock[:, None] + np.arange(n_orders), n_stock - 1)
    shape = (n_stock,) + (n_orders,) * (lead_time - 1)
    given = None if policy is None else _orders_of(policy, shape, n_orders)

    def sweep(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # follow[stock left, arriving order, (the others,) new order]: the value of where that leads
        follow = values[arriving]
        if lead_time > 1:
            expected = (to_left @ follow.reshape(n_stock, -1)).reshape(n_stock, n_orders, *values.shape[1:])
        else:
            expected = to_left @ follow
        orders = expected.argmin(axis=-1) if given is None else given
        chosen = np.take_along_axis(expected, orders[..., None], axis=-1)[..., 0]
        return cost.reshape(-1, *[1] * (lead_time - 1)) + chosen, orders

    return _iterate(sweep, shape, tolerance)


def dual_sourcing_cost(
    problem: DualSourcing,
    policy: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None,
    tolerance: float = 1e-3,
    stock_range: tuple[int, int] = (-12, 27),
) -> AverageCost:
    """Average cost of the best policy, or of a given one; what cannot be influenced included.

    :param problem: The problem; of any number of stores.
    :param policy: Gets states `[n, lead_time]` (net stock, then outstanding orders, in units), gives express and
        regular orders `[n]`; `None`: the best one.
    :param tolerance: The bounds are at most this far apart.
    :param stock_range: Smallest and largest net stock before the express order.
    """
    lowest, highest = stock_range
    n_express, n_regular, lead_time = problem.max_express + 1, problem.max_regular + 1, problem.lead_time
    demand = problem.probabilities
    n_stock = highest - lowest + 1
    shape = (n_stock,) + (n_regular,) * (lead_time - 1)
    # after the express order: n_stock + n_express - 1 net stocks; after the demand: len(demand) - 1 more below
    raised = np.arange(lowest, highest + n_express)
    after = raised[:, None] - np.arange(len(demand))
    period_cost = np.where(after >= 0, problem.holding_cost * after, -problem.backlog_cost * after) @ demand
    ends = np.arange(lowest - len(demand) + 1, highest + n_express)
    to_end = np.zeros((len(raised), len(ends)))
    starts = np.repeat(np.arange(len(raised)), len(demand))
    np.add.at(to_end, (starts, (after - ends[0]).ravel()), np.tile(demand, len(raised)))
    arrived = ends[:, None] + np.arange(n_regular)
    too_low = 1e4 * (arrived < lowest)
    arriving = np.clip(arrived - lowest, 0, n_stock - 1)
    prices = problem.regular_cost * np.arange(n_regular)
    given = None
    if policy is not None:
        states = _states(shape)
        states[:, 0] += lowest
        express, regular = policy(states)
        given = np.clip(express, 0, n_express - 1).reshape(shape), np.clip(regular, 0, n_regular - 1).reshape(shape)

    def sweep(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        extra = np.expand_dims(too_low, tuple(range(2, lead_time + 1)))
        follow = values[arriving] + extra  # [end, arriving order, (the others,) new order]
        expected = (to_end @ follow.reshape(len(ends), -1)).reshape(len(raised), *follow.shape[1:])
        expected = expected + prices + period_cost.reshape(-1, *[1] * lead_time)
        # of each express order: [stock, arriving order, ..., new order]
        if given is None:
            best_regular = expected.min(axis=-1)
            options = np.stack(
                [best_regular[e : e + n_stock] + problem.express_cost * e for e in range(n_express)], axis=-1
            )
            express = options.argmin(axis=-1)
            return options.min(axis=-1), express
        express, regular = given
        rows = np.arange(n_stock).reshape(-1, *[1] * (lead_time - 1)) + express
        place = (rows, *np.indices(shape)[1:], regular)
        return expected[place] + problem.express_cost * express, express

    return _iterate(sweep, shape, tolerance)


def _iterate(
    sweep: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], shape: tuple[int, ...], tolerance: float
) -> AverageCost:
    values = np.zeros(shape)
    while True:
        following, orders = sweep(values)
        change = following - values
        low, high = float(change.min()), float(change.max())
        if high - low < tolerance:
            return AverageCost((low + high) / 2, (high - low) / 2, orders)
        values = following - following.flat[0]


def _orders_of(policy: Callable[[np.ndarray], np.ndarray], shape: tuple[int, ...], n_orders: int) -> np.ndarray:
    return np.asarray(np.clip(policy(_states(shape)), 0, n_orders - 1)).reshape(shape)


def _states(shape: tuple[int, ...]) -> np.ndarray:
    """Return the indices of all states, `[n_states, n_dimensions]`."""
    return np.asarray(np.indices(shape).reshape(len(shape), -1).T)
