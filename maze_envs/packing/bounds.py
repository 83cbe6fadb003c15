"""Lower bounds on the number of bins."""

from __future__ import annotations

import numpy as np


def volume_bound(items: np.ndarray, capacity: int) -> int:
    """Return L1: the total size of the items divided by the capacity, rounded up.

    :param items: Sizes, `[n_items]`.
    :param capacity: Capacity of a bin.
    """
    return int(-(-int(items.sum()) // capacity))
