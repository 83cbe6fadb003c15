"""The optimum of the criss-cross network, by relative value iteration on bounded queues."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from maze_envs.queueing.network import CRISS_CROSS


def criss_cross_optimum(
    regime: str,
    buffer: int,
    policy: Callable[[np.ndarray], np.ndarray] | None = None,
    tolerance: float = 1e-3,
) -> tuple[float, float]:
    """Average number of jobs under the best policy, or a given one.

    Jobs that find a full buffer are lost, which makes the average too small; in light load by nothing that can be seen.

    :param regime: Load regime.
    :param buffer: So many jobs of a class at most.
    :param policy: Gets states `[n, 3]` (jobs by class), gives the class, 0 or 1, that the first server works on;
        `None`: the best one.
    :param tolerance: The bounds are at most this far apart.
    :return: Lower and upper bound.
    """
    arrival, second = CRISS_CROSS[regime]
    size = buffer + 1
    counts = np.indices((size, size, size))
    cost = counts.sum(axis=0).astype(float)
    total_rate = 2 * arrival + 2.0 + second
    chosen = None if policy is None else policy(counts.reshape(3, -1).T).reshape(size, size, size)
    values = np.zeros((size, size, size))
    while True:
        after = arrival * (_more(values, 0) + _more(values, 1)) + second * _fewer(values, 2)
        # a job of class 0 goes on as one of class 2; whom nobody waits for stays idle
        first = np.where(counts[0] > 0, _fewer(_more(values, 2), 0), values)
        second_choice = _fewer(values, 1)
        served = np.minimum(first, second_choice) if chosen is None else np.where(chosen, second_choice, first)
        following = cost + (after + 2.0 * served) / total_rate
        change = following - values
        low, high = float(change.min()), float(change.max())
        if high - low < tolerance:
            return low, high
        values = following - following[0, 0, 0]


def _more(values: np.ndarray, axis: int) -> np.ndarray:
    """The values with one more job of a class; of a full buffer as it is."""
    index = np.minimum(np.arange(values.shape[axis]) + 1, values.shape[axis] - 1)
    return np.asarray(np.take(values, index, axis=axis))


def _fewer(values: np.ndarray, axis: int) -> np.ndarray:
    """The values with one job less of a class; of an empty buffer as it is."""
    return np.asarray(np.take(values, np.maximum(np.arange(values.shape[axis]) - 1, 0), axis=axis))
