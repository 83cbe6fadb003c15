"""What can be said of few runs and episodes: interquartile means, bootstrap intervals, probabilities of improvement.

After Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Values = np.ndarray[Any, Any]
Statistic = Callable[[Values], Values]
"""Reduces the last axis."""

N_RESAMPLES = 2000
CONFIDENCE = 0.95
# Student's t at 97.5 % for 1, 2, ... degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T_BEYOND = ((20, 2.086), (30, 2.042), (60, 2.000), (120, 1.980))


class Estimate(NamedTuple):
    """A value and the interval in which it lies with 95 % confidence.

    :param value: The value.
    :param low: Lower end; NaN where too little is known.
    :param high: Upper end; NaN where too little is known.
    """

    value: float
    low: float
    high: float

    def text(self) -> str:
        """The value with its interval, in few digits."""
        return f"{self.value:.5g} [{self.low:.4g}, {self.high:.4g}]"


def mean(values: Values) -> Values:
    """The mean over the last axis."""
    return np.asarray(values.mean(axis=-1))


def interquartile_mean(values: Values) -> Values:
    """The mean of the middle half over the last axis: as robust as a median, and nearly as precise as a mean.

    A quarter of the values, rounded down, is left out at each end.

    >>> float(interquartile_mean(np.array([1.0, 2.0, 4.0, 100.0])))
    3.0
    """
    n = values.shape[-1]
    cut = n // 4
    return np.asarray(np.sort(values, axis=-1)[..., cut : n - cut].mean(axis=-1))


def bootstrap_estimate(
    strata: Sequence[Values], statistic: Statistic = mean, n_resamples: int = N_RESAMPLES, seed: int = 0
) -> Estimate:
    """A statistic of all values with the percentile interval of a stratified bootstrap.

    :param strata: Values that are drawn again among themselves: all values in one array, or an array for each task.
    :param statistic: Reduces the last axis.
    :param n_resamples: How often values are drawn again.
    :param seed: Of the draws; the same values have the same interval.
    """
    value = float(statistic(np.concatenate(strata)))
    if any(len(stratum) < 2 for stratum in strata):
        return Estimate(value, np.nan, np.nan)
    rng = np.random.default_rng(seed)
    draws = [stratum[rng.integers(len(stratum), size=(n_resamples, len(stratum)))] for stratum in strata]
    low, high = np.quantile(statistic(np.concatenate(draws, axis=-1)), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))


def mean_with_t_interval(values: Values) -> tuple[Values, Values, Values]:
    """Mean and 95 % interval by Student's t over the first axis, for curves of few runs.

    :param values: Shape `[n_runs, n_points]`.
    :return: Mean, lower and upper end, each `[n_points]`; of a single run, the run itself.
    """
    centre = values.mean(axis=0)
    n = len(values)
    if n < 2:
        return centre, centre, centre
    half = _student_t(n - 1) * values.std(axis=0, ddof=1) / np.sqrt(n)
    return centre, centre - half, centre + half


def explained_share(parameter: Sequence[str], objective: Values, n_groups: int = 4) -> float:
    """Which share of an objective's variance the differences in one parameter explain (ε², Kelley 1935).

    Numbers with many values are compared by groups of equal size. The correction for the number of groups makes it 0
    on average where the parameter means nothing; estimates below that are 0.

    :param parameter: Its value in each trial.
    :param objective: What the trials have reached, `[n_trials]`.
    :param n_groups: Number of groups of a parameter with more different values.
    """
    groups = _groups(parameter, n_groups)
    n, k = len(objective), len(set(groups))
    total = float(((objective - objective.mean()) ** 2).sum())
    if k < 2 or n <= k or not total > 0:
        return 0.0
    within = sum(
        float(((members - members.mean()) ** 2).sum())
        for group in set(groups)
        if len(members := objective[np.asarray(groups) == group])
    )
    return max(0.0, 1.0 - (within / (n - k)) / (total / (n - 1)))


def _groups(values: Sequence[str], n_groups: int) -> list[Any]:
    if len(set(values)) <= n_groups:
        return list(values)
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return list(values)
    edges = np.quantile(numbers, np.arange(1, n_groups) / n_groups)
    return list(np.searchsorted(edges, numbers, side="right"))


def _student_t(degrees: int) -> float:
    if degrees <= len(_T):
        return _T[degrees - 1]
    return next((t for least, t in reversed(_T_BEYOND) if degrees >= least), _T[-1])
