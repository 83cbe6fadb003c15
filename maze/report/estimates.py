"""Estimates from few runs and episodes, with 95 % confidence intervals.

Assumptions: episodes are independent, and so are runs; returns of runs are approximately normal. The only assumption
about the distribution over episodes is that losses large enough to change the mean are among them: see
:func:`unseen_share`. `benchmarks/intervals.py` simulates how often the intervals miss the truth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from maze.core.utils.stats_utils import tail_values

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
