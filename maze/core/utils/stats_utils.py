"""Running statistics, and the tail of a distribution."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    import torch

ArrayType = TypeVar("ArrayType", np.ndarray, "torch.Tensor")


def tail_values(values: ArrayType, quantile: Any, level: float) -> ArrayType:
    """Return `min(values - q, 0) / level`: their mean plus `q` is the CVaR if `q` is the quantile of the level, and a
    lower bound of the CVaR otherwise (Rockafellar and Uryasev 2000).

    CVaR is the mean of the smallest share `level` of the values.

    :param values: An array or a tensor of any shape.
    :param quantile: A number, or an array that broadcasts with the values.
    :param level: Above 0, up to 1.
    """
    tail: ArrayType = (values - quantile).clip(max=0.0) / level
    return tail


class CumulativeMovingMeanStd:
    """Running mean and standard deviation (Chan et al. 1979).

    :param epsilon: Initial weight of a mean of 0 and a variance of 1; avoids a deviation of 0 after the first value.
        With 0 the statistics are those of the data alone.
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
        """Add new data.

        An array has the shape `[n_samples, ...]`.

        :param new_data: One number, or an array whose first axis counts samples; the others are kept apart.
        """
        data = np.atleast_1d(np.asarray(new_data, dtype=np.float64))
        if len(data):
            self.merge(len(data), data.mean(axis=0), data.var(axis=0))

    def merge(self, count: float, mean: np.ndarray | float, var: np.ndarray | float) -> None:
        """Add the statistics of further data.

        :param count: Number of samples, above 0.
        :param mean: Their mean; a number, or `[...]` as the samples.
        :param var: Their variance, in the same shape.
        """
        total = self.count + count
        shift = mean - self.mean
        squares = self.var * self.count + var * count + shift**2 * self.count * count / total
        self.mean = self.mean + shift * count / total
        self.var = squares / total
        self.count = total
