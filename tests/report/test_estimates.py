"""Estimates from few runs and episodes, by hand-worked numbers and laws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from maze.report.estimates import (
    bootstrap_estimate,
    explained_share,
    interquartile_mean,
    mean_with_t_interval,
)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 20])
def test_interquartile_mean_is_the_trimmed_mean_of_the_paper(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(5, n))
    np.testing.assert_allclose(interquartile_mean(values), stats.trim_mean(values, 0.25, axis=-1))


def test_bootstrap_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    n_covered = 0
    for _ in range(200):
        estimate = bootstrap_estimate([rng.normal(1.0, 2.0, size=40)], n_resamples=400)
        n_covered += estimate.low <= 1.0 <= estimate.high
    assert 180 <= n_covered <= 199


def test_strata_are_drawn_among_themselves() -> None:
    """Between constant strata nothing varies, however far apart they are."""
    estimate = bootstrap_estimate([np.full(5, 1.0), np.full(5, 9.0)])
    assert estimate == (5.0, 5.0, 5.0)
    assert np.isnan(bootstrap_estimate([np.array([3.0])]).low)


def test_t_interval_of_three_runs() -> None:
    """1, 2, 3: the deviation is 1, so that 2 -+ 4.303 / sqrt(3)."""
    centre, low, high = mean_with_t_interval(np.array([[1.0], [2.0], [3.0]]))
    assert centre == [2.0]
    np.testing.assert_allclose([low[0], high[0]], [2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5])
    for n in (2, 5, 16, 18, 25, 200):
        values = np.random.default_rng(n).normal(size=(n, 1))
        low = mean_with_t_interval(values)[1]
        expected = stats.t.interval(0.95, n - 1, values.mean(), stats.sem(values[:, 0]))[0]
        np.testing.assert_allclose(values.mean() - low[0], values.mean() - expected, rtol=0.02)


def test_a_parameter_that_decides_explains_everything_and_one_that_does_not_explains_nothing() -> None:
    rng = np.random.default_rng(1)
    lr = [repr(value) for value in rng.random(60).tolist()]
    objective = np.array([float(text) for text in lr])
    assert explained_share(lr, objective) > 0.8
    assert explained_share(["a", "b"] * 30, np.repeat([1.0, 2.0], 30)) < 0.01
    assert explained_share(["a"] * 30 + ["b"] * 30, np.repeat([1.0, 2.0], 30)) == 1.0
    assert explained_share(["a", "b"] * 30, np.ones(60)) == 0.0
    meaningless = [explained_share([str(value) for value in rng.random(60)], rng.random(60)) for _ in range(50)]
    assert np.mean(meaningless) < 0.05
