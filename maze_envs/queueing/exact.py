"""The optimum of the criss-cross network, by relative value iteration on bounded queues; precise averages of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from maze_envs.queueing.network import CRISS_CROSS, network_of


class Values(NamedTuple):
    """Result of value iteration.

    :param low: Lower bound of the average number of jobs.
    :param high: Upper bound.
    :param values: `[buffer + 1, buffer + 1, buffer + 1]`: jobs, summed over all ticks, that a start in a state costs
        more than one with empty queues.
    """

    low: float
    high: float
    values: np.ndarray


Policy = Callable[[np.ndarray], np.ndarray]
"""Gets states `[n, 3]` (jobs by class), gives the class, 0 or 1, that the first server works on."""


def criss_cross_optimum(
    regime: str, buffer: int, policy: Policy | None = None, tolerance: float = 1e-3
) -> tuple[float, float]:
    """Return bounds of the mean number of jobs under the best or a given policy; see :func:`criss_cross_values`."""
    found = criss_cross_values(regime, buffer, policy, tolerance)
    return found.low, found.high


def criss_cross_values(regime: str, buffer: int, policy: Policy | None = None, tolerance: float = 1e-3) -> Values:
    """Average number of jobs, and values of all states, under the best policy or a given one.

    Jobs that find a full buffer are lost, which makes the average too small; in light load by nothing that can be seen.

    :param regime: Load regime.
    :param buffer: So many jobs of a class at most.
    :param policy: What is done; `None`: the best.
    :param tolerance: The bounds are at most this far apart.
    """
    values = np.zeros((buffer + 1,) * 3)
    chosen = None if policy is None else tabulated(policy, buffer)
    while True:
        following = _following(regime, values, chosen)
        change = following - values
        low, high = float(change.min()), float(change.max())
        if high - low < tolerance:
            return Values(low, high, values)
        values = following - following[0, 0, 0]


def smoothed_cost(regime: str, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return a cost of states whose long-run average is that of the number of jobs, and varies less.

    It is the number of jobs, and what the values are expected to change by until the next tick. In the long run values
    do not change, whatever they are; the closer they are to those of the policy, the more equal are the costs of all
    states. With those of the best policy, an average says what a policy costs more than the best one (Henderson and
    Glynn 2002, Approximating martingales for variance reduction in Markov process simulation, Mathematics of Operations
    Research 27 (2)).

    :param regime: Load regime.
    :param values: Of states up to some buffer, which should be larger than queues ever become.
    :param chosen: What is done in each of these states, see :func:`tabulated`.
    :return: Costs, with the shape of the values.
    """
    return np.asarray(_following(regime, values, chosen) - values)


def expected_changes(
    network: str, jobs: np.ndarray, served: np.ndarray, values: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return what functions of the state are expected to change by until the next tick.

    In the long run they change by 0 on average, whatever the functions are: control variates for averages of any
    network, as :func:`smoothed_cost` has them for one whose states can be listed.

    :param network: Name of the network.
    :param jobs: States, `[n, n_classes]`.
    :param served: Which classes are worked on, bool, the same shape; where no job of them waits it does not matter.
    :param values: Gets states `[m, n_classes]`, gives `[m, n_functions]`.
    :return: `[n, n_functions]`
    """
    net = network_of(network)
    changed, rates = [jobs], []
    for index, (arrival, service, following) in enumerate(zip(net.arrivals, net.services, net.following, strict=True)):
        if arrival > 0:
            changed.append(jobs + _one(index, jobs))
            rates.append(np.full(len(jobs), arrival))
        moved = jobs - _one(index, jobs) + (_one(following, jobs) if following >= 0 else 0)
        is_done = served[:, index] & (jobs[:, index] > 0)
        changed.append(np.where(is_done[:, None], moved, jobs))
        rates.append(np.full(len(jobs), service))
    now, *after = np.split(values(np.concatenate(changed)), len(changed))
    total = sum(net.arrivals) + sum(net.services)
    return np.asarray(sum(rate[:, None] * (then - now) for rate, then in zip(rates, after, strict=True)) / total)


def _one(index: int, jobs: np.ndarray) -> np.ndarray:
    return np.asarray(np.arange(jobs.shape[1]) == index)


def tabulated(policy: Policy, buffer: int) -> np.ndarray:
    """Return actions of a policy in states of up to `buffer` jobs a class, `[buffer + 1, buffer + 1, buffer + 1]`."""
    plane = np.indices((buffer + 1,) * 2).reshape(2, -1).T
    actions = (policy(np.column_stack([np.full(len(plane), first), plane])) for first in range(buffer + 1))
    return np.stack([np.asarray(of_plane, np.int8).reshape(buffer + 1, buffer + 1) for of_plane in actions])


def _following(regime: str, values: np.ndarray, chosen: np.ndarray | None) -> np.ndarray:
    """Return jobs of this tick and the values after it, with what was chosen or the better choice."""
    arrival, second = CRISS_CROSS[regime]
    first_queue = np.arange(len(values))
    n_jobs = first_queue[:, None, None] + first_queue[:, None] + first_queue
    after = arrival * (_more(values, 0) + _more(values, 1)) + second * _fewer(values, 2)
    # a job of class 0 goes on as one of class 2; a server without waiting jobs stays idle
    first = np.where(first_queue[:, None, None] > 0, _fewer(_more(values, 2), 0), values)
    second_choice = _fewer(values, 1)
    served = np.minimum(first, second_choice) if chosen is None else np.where(chosen, second_choice, first)
    return np.asarray(n_jobs + (after + 2.0 * served) / (2 * arrival + 2.0 + second))


def _more(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the values with one more job of a class; of a full buffer as it is."""
    index = np.minimum(np.arange(values.shape[axis]) + 1, values.shape[axis] - 1)
    return np.asarray(np.take(values, index, axis=axis))


def _fewer(values: np.ndarray, axis: int) -> np.ndarray:
    """Return the values with one job less of a class; of an empty buffer as it is."""
    return np.asarray(np.take(values, np.maximum(np.arange(values.shape[axis]) - 1, 0), axis=axis))
