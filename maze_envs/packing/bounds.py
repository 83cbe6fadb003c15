"""Lower bounds on the number of bins."""

from __future__ import annotations

import numpy as np


def volume_bound(items: np.ndarray, capacity: int) -> int:
    """Return L1: the total size of the items divided by the capacity, rounded up.

    :param items: Sizes, `[n_items]`.
    :param capacity: Capacity of a bin.
    """
    return int(-(-int(items.sum()) // capacity))


def martello_toth_bound(items: np.ndarray, capacity: int) -> int:
    """Return L2 of Martello, Toth (1990), Lower bounds and reduction procedures for the bin packing problem, Discrete
    Applied Mathematics 28: items above half a bin need one each, and take no more than what is left beside them.

    :param items: Sizes, `[n_items]`.
    :param capacity: Capacity of a bin.
    """
    best = volume_bound(items, capacity)
    for smallest in range(1, capacity // 2 + 1):
        n_large = int((items > capacity - smallest).sum())
        medium = items[(items > capacity // 2) & (items <= capacity - smallest)]
        small = items[(items >= smallest) & (items <= capacity // 2)]
        room = len(medium) * capacity - int(medium.sum())
        best = max(best, n_large + len(medium) + max(0, -((room - int(small.sum())) // capacity)))
    return best
