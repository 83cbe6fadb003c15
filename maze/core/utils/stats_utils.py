"""Statistics of data that arrives bit by bit."""

from __future__ import annotations

import numpy as np


class CumulativeMovingMeanStd:
    """Mean and standard deviation of everything seen so far, without keeping it (Chan et al. 1979).

    :param epsilon: Initial weight of a mean of 0 and a variance of 1; avoids a deviation of 0 after the first value.
    """

    def __init__(self, epsilon: float = 1e-8) -> None:
        self.mean: np.ndarray | float = 0.0
        self.var: np.ndarray | float = 1.0
        self.count = epsilon

    @property
    def std(self) -> np.ndarray | float:
        """Standard deviation (of the population).

        :return: A number; or `[...]` as the samples, without their first axis.
        """
        return np.sqrt(self.var)

    def update(self, new_data: np.ndarray | float) -> None:
        """Takes new data into account.

        An array has the shape `[n_samples, ...]`.

        :param new_data: One number, or an array whose first axis counts samples; the others are kept apart.
        """
        data = np.atleast_1d(np.asarray(new_data, dtype=np.float64))
        if len(data) == 0:
            return
        count = self.count + len(data)
        shift = data.mean(axis=0) - self.mean
        squares = self.var * self.count + data.var(axis=0) * len(data) + shift**2 * self.count * len(data) / count
        self.mean = self.mean + shift * len(data) / count
        self.var = squares / count
        self.count = count
