"""Running statistics, the tail of a distribution, and estimates from few runs and episodes.

Assumptions of the 95 % confidence intervals: episodes are independent, and so are runs; returns of runs are
approximately normal. The only assumption about the distribution over episodes is that losses large enough to change the
mean are among them: see :func:`unseen_share`. `benchmarks/intervals.py` simulates how often the intervals miss the
truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

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


# -- estimates with confidence intervals -------------------------------------------------------------------------------

Values = np.ndarray[Any, Any]
Interval = tuple[Values, Values, Values]
"""An estimate with the lower and the upper end of its interval."""
Bounds = tuple[float, float]

_UPPER = 0.975
_N_DRAWS = 2000
# Distance of the added value from the worst one, relative to the distance of the worst one from the mean.
_BEYOND = 0.5


class Estimate(NamedTuple):
    """A value with its 95 % confidence interval.

    :param value: The value.
    :param low: Lower end; NaN: too few values.
    :param high: Upper end; NaN: too few values.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval) -> Estimate:
        """Convert a single interval.

        :param interval: Value, lower and upper end, each a number or an array with one element.
        """
        return cls(*map(float, interval))

    def at_least(self, least: float) -> Estimate:
        """Return the estimate of a quantity that is known not to be smaller than a number.

        :param least: The number, which a lower end below it is raised to.
        """
        return self._replace(low=max(self.low, least))

    @property
    def is_known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)


def unseen_share(n_episodes: int) -> float:
    """Return the largest share of episodes of an event that may be missing: others occur with 97.5 % probability.

    >>> round(unseen_share(200), 4)
    0.0183

    :param n_episodes: Number of independent episodes, at least 1.
    :return: In (0, 1).
    """
    return -math.expm1(math.log1p(-_UPPER) / n_episodes)


def episodes_to_see(share: float) -> int:
    """Return the number of episodes in which an event occurs at least once, with 97.5 % probability.

    :param share: Probability of the event in an episode.

    >>> episodes_to_see(0.001)
    3688
    """
    return math.ceil(math.log1p(-_UPPER) / math.log1p(-share))


def interquartile_mean(values: Values) -> Values:
    """Return the mean of the middle half over the last axis, robust as a median and nearly as precise as a mean.

    A quarter of the values, rounded down, is removed at each end (Agarwal et al. 2021). With NaN among them it is NaN.

    >>> float(interquartile_mean(np.array([1.0, 2.0, 4.0, 100.0])))
    3.0
    """
    n = values.shape[-1]
    cut = n // 4
    middle = np.sort(values, axis=-1)[..., cut : n - cut].mean(axis=-1)
    return np.where(np.isnan(values).any(axis=-1), np.nan, middle)  # sorting takes NaN for the largest value


def t_interval(values: Values, axis: int = -1, degrees: int | None = None) -> Interval:
    """Estimate the mean over an axis by Student's t.

    :param values: At least two values along the axis, otherwise the ends are NaN.
    :param axis: The axis.
    :param degrees: Degrees of freedom; `None`: one less than there are values.
    """
    centre = np.asarray(values.mean(axis))
    n = values.shape[axis]
    if n < 2:
        return centre, np.full_like(centre, np.nan), np.full_like(centre, np.nan)
    half = _t(n - 1 if degrees is None else degrees) * values.std(axis, ddof=1) / math.sqrt(n)
    return centre, centre - half, centre + half


def skewed_interval(values: Values) -> Interval:
    """Estimate the mean over the last axis, corrected for skewness and rare large losses.

    Hall's transformation of the t statistic (Hall 1992, "On the removal of skewness by transformation") of the values
    and an additional one beyond the worst of them, for each end.

    :param values: `[..., n]`; at least two, otherwise the ends are NaN.
    """
    centre = np.asarray(values.mean(-1))
    if values.shape[-1] < 2:
        return centre, np.full_like(centre, np.nan), np.full_like(centre, np.nan)
    with np.errstate(invalid="ignore"):  # infinite values have no interval
        return centre, _lower_end(values), -_lower_end(-values)


def _lower_end(values: Values) -> Values:
    worst = values.min(-1, keepdims=True)
    values = np.concatenate([values, worst - _BEYOND * (values.mean(-1, keepdims=True) - worst)], -1)
    n = values.shape[-1]
    centre, deviation = values.mean(-1), values.std(-1, ddof=1)
    skewness = (((values - centre[..., None]) / np.where(deviation > 0, deviation, 1.0)[..., None]) ** 3).mean(-1)
    skewness = np.where(np.abs(skewness) < 1e-6, 1e-6, skewness)  # the limit, without dividing by zero
    statistic = _t(n - 1) / math.sqrt(n)
    transformed = 3.0 / skewness * (np.cbrt(1.0 + skewness * (statistic - skewness / (6 * n))) - 1.0)
    return np.asarray(centre - deviation * transformed)


def bounded_interval(values: Values, bounds: Bounds) -> Interval:
    """Estimate the mean over the last axis of values with a known range; valid for any number of values.

    The bound of Gaffke (2005): values and one end of the range, with random weights from a Dirichlet distribution. For
    two possible values it is that of Clopper and Pearson.

    :param values: `[..., n]`.
    :param bounds: The smallest and the largest possible value.
    """
    weights = np.random.default_rng(0).exponential(size=(values.shape[-1] + 1, _N_DRAWS))
    weights /= weights.sum(0)
    means = values @ weights[1:]
    low, high = (means + end * weights[0] for end in bounds)
    return np.asarray(values.mean(-1)), np.quantile(low, 1 - _UPPER, axis=-1), np.quantile(high, _UPPER, axis=-1)


def mean_interval(ours: Values, theirs: Values | None = None, bounds: Bounds | None = None) -> Interval:
    """Estimate the mean over runs and episodes, or the difference of two means in the same episodes.

    Intervals over episodes (of the means over runs) and over runs (of the means over episodes, Student's t) are
    combined by the method of variance estimates recovery (Zou and Donner 2008). A single run has no variation of runs.

    :param ours: `[..., n_runs, n_episodes]`.
    :param theirs: The subtrahend, with the same episodes and other runs.
    :param bounds: Range of an episode's value or difference, if known.
    """
    episodes = ours.mean(-2) if theirs is None else ours.mean(-2) - theirs.mean(-2)
    parts = [skewed_interval(episodes) if bounds is None else bounded_interval(episodes, bounds)]
    parts += [t_interval(runs.mean(-1)) for runs in (ours, theirs) if runs is not None and runs.shape[-2] > 1]
    centre, low, high = _combined(parts)
    return (centre, low, high) if bounds is None else (centre, np.maximum(low, bounds[0]), np.minimum(high, bounds[1]))


def iqm_interval(values: Values) -> Interval:
    """Estimate the interquartile mean over runs and episodes (trimmed t statistic, Tukey and McLaughlin 1963).

    :param values: `[n_runs, n_episodes]`.
    """
    n = values.size
    cut = n // 4
    ordered = np.sort(values, axis=None)
    winsorized = values.clip(ordered[cut], ordered[n - cut - 1]) / (1 - 2 * cut / n)
    parts = [_trimmed_interval(winsorized.mean(-2))]
    if len(winsorized) > 1:
        parts.append(_trimmed_interval(winsorized.mean(-1)))
    centre, low, high = _combined(parts)
    value = interquartile_mean(values.ravel())
    return value, value - (centre - low), value + (high - centre)


def tail_contributions(values: Values, level: float) -> Values:
    """Return the quantile of the level plus :func:`~maze.core.utils.stats_utils.tail_values`: their mean is the CVaR.

    They differ from it by its influence function, so that intervals and differences of means are those of the CVaR.

    :param values: `[..., n]`.
    :param level: Above 0, up to 1.

    >>> tail_contributions(np.array([3.0, 1.0, 2.0, 4.0]), 0.5).tolist()
    [2.0, 0.0, 2.0, 2.0]
    """
    quantile = np.quantile(values, level, axis=-1, keepdims=True, method="inverted_cdf")
    return np.asarray(quantile + tail_values(values, quantile, level))


def quantile_interval(values: Values, level: float) -> Interval:
    """Estimate a quantile over episodes; its interval is that of two order statistics, valid for any distribution.

    Quantiles of several runs are averaged, and their variation is combined as in :func:`mean_interval`.

    :param values: `[n_runs, n_episodes]`. The ends are infinite if there are too few episodes for the level.
    :param level: Above 0, below 1.
    """
    from scipy import special

    n = values.shape[-1]
    below = special.bdtr(np.arange(n + 1), n, level)  # of so many values at most
    ranks = np.searchsorted(below, 1 - _UPPER, side="right"), np.searchsorted(below, _UPPER) + 1
    ordered = np.pad(np.sort(values, axis=-1), ((0, 0), (1, 1)), constant_values=(-np.inf, np.inf))
    low, high = (ordered[:, min(rank, n + 1)].mean() for rank in ranks)
    quantiles = np.quantile(values, level, axis=-1, method="inverted_cdf")
    parts = [(quantiles.mean(), low, high)]
    return _combined(parts + ([t_interval(quantiles)] if len(values) > 1 else []))


def _trimmed_interval(winsorized: Values) -> Interval:
    n = len(winsorized)
    return t_interval(winsorized, degrees=max(1, n - 2 * (n // 4) - 1))


def _combined(parts: Sequence[Interval]) -> Interval:
    """Combine intervals: the first estimate, with the root of the summed squares of all distances."""
    below = np.sqrt(sum((centre - low) ** 2 for centre, low, _ in parts))
    above = np.sqrt(sum((high - centre) ** 2 for centre, _, high in parts))
    return parts[0][0], parts[0][0] - below, parts[0][0] + above


def _t(degrees: int) -> float:
    from scipy import special  # a fifth of the import time of scipy.stats

    return float(special.stdtrit(degrees, _UPPER))
