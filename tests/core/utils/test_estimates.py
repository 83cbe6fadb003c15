"""Estimates from few runs and episodes, by hand-worked numbers and laws."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from maze.core.utils.stats_utils import (
    bounded_interval,
    episodes_to_see,
    interquartile_mean,
    iqm_interval,
    mean_interval,
    quantile_interval,
    skewed_interval,
    t_interval,
    tail_contributions,
    unseen_share,
)


@pytest.mark.parametrize("n", [1, 3, 4, 7, 20])
def test_interquartile_mean_is_the_trimmed_mean_of_the_paper(n: int) -> None:
    values = np.random.default_rng(n).normal(size=(5, n))
    np.testing.assert_allclose(interquartile_mean(values), stats.trim_mean(values, 0.25, axis=-1))


def test_interquartile_means_of_unknown_values_are_unknown() -> None:
    """Of 1 to 7 and NaN it would be 4.5, were NaN the best value of all."""
    values = np.array([[1.0, 2.0, 3.0, 4.0, np.nan, 5.0, 6.0, 7.0], np.arange(8.0)])
    np.testing.assert_array_equal(interquartile_mean(values), [np.nan, 3.5])
    assert np.isnan(iqm_interval(values[:1])).all()


def test_t_interval_of_three_runs() -> None:
    """1, 2, 3: the deviation is 1, so that 2 -+ 4.303 / sqrt(3)."""
    centre, low, high = t_interval(np.array([[1.0], [2.0], [3.0]]), axis=0)
    assert centre == [2.0]
    np.testing.assert_allclose([low[0], high[0]], [2 - 4.30265 / 3**0.5, 2 + 4.30265 / 3**0.5], rtol=1e-5)
    assert np.isnan(t_interval(np.array([3.0]))[1])


def test_interquartile_mean_interval_is_that_of_trimmed_means() -> None:
    values = np.random.default_rng(2).normal(size=40) ** 3
    expected = stats.mstats.trimmed_mean_ci(values, (0.25, 0.25))
    np.testing.assert_allclose(iqm_interval(values[np.newaxis])[1:], expected)


@pytest.mark.parametrize(("n_seen", "n"), [(0, 1), (0, 20), (3, 50), (20, 20)])
def test_a_known_range_gives_the_bounds_of_clopper_and_pearson(n_seen: int, n: int) -> None:
    values = np.repeat([1.0, 0.0], [n_seen, n - n_seen])
    expected = stats.binomtest(n_seen, n).proportion_ci(0.95, "exact")
    _, low, high = bounded_interval(values, (0.0, 1.0))
    np.testing.assert_allclose([low, high], [expected.low, expected.high], atol=0.03)


def test_intervals_move_and_turn_with_the_values() -> None:
    values = np.random.default_rng(1).exponential(size=30)
    centre, low, high = skewed_interval(values)
    assert high - centre > centre - low > 0, "longer where the long tail is"
    np.testing.assert_allclose(skewed_interval(5.0 - 2.0 * values), [5 - 2 * centre, 5 - 2 * high, 5 - 2 * low])
    np.testing.assert_allclose(skewed_interval(np.full(30, 7.1)), [7.1] * 3)
    assert np.isnan(skewed_interval(np.array([7.1]))[1])


HEAVY = {
    "normal": (lambda rng, shape: rng.normal(size=shape), 0.03),
    "t": (lambda rng, shape: rng.standard_t(3, size=shape), 0.05),
    "lognormal": (lambda rng, shape: np.exp(0.5) - np.exp(rng.normal(size=shape)), 0.05),
    "catastrophes": (lambda rng, shape: 0.03 - (rng.random(shape) < 0.03), 0.05),
    "noisy catastrophes": (
        lambda rng, shape: 0.03 - (rng.random(shape) < 0.03) + 0.1 * rng.normal(size=shape),
        0.05,
    ),
}


@pytest.mark.parametrize("n_episodes", [200, 300, 1000])
@pytest.mark.parametrize("name", HEAVY)
def test_an_interval_over_episodes_lies_above_the_mean_as_rarely_as_promised(name: str, n_episodes: int) -> None:
    draw, most = HEAVY[name]
    _, low, _ = skewed_interval(draw(np.random.default_rng(n_episodes), (2000, n_episodes)))
    assert (low >= 1e-9).mean() <= most


@pytest.mark.parametrize("n_runs", [2, 3, 5, 10])
@pytest.mark.parametrize("deviation", [0.2, 1.0, 5.0])
def test_intervals_over_runs_that_differ_cover_the_mean(n_runs: int, deviation: float) -> None:
    rng = np.random.default_rng(n_runs)
    n = 2000
    values = (
        rng.normal(size=(n, n_runs, 20)) + deviation * rng.normal(size=(n, n_runs, 1)) + rng.normal(size=(n, 1, 20))
    )
    others = rng.normal(size=(n, n_runs, 20)) + deviation * rng.normal(size=(n, n_runs, 1))
    for ours, theirs in ((values, None), (values, others)):
        _, low, high = mean_interval(ours, theirs)
        assert ((low <= 0) & (high >= 0)).mean() >= 0.93


def test_events_too_rare_to_be_seen() -> None:
    """(1 - p)^n = 0.025."""
    assert (1 - unseen_share(200)) ** 200 == pytest.approx(0.025)
    n = episodes_to_see(0.01)
    assert 0.99**n <= 0.025 < 0.99 ** (n - 1)


@pytest.mark.parametrize(("level", "worst"), [(0.1, 2), (0.25, 5), (0.5, 10)])
def test_the_mean_of_the_tail_is_that_of_the_worst_episodes(level: float, worst: int) -> None:
    values = np.random.default_rng(3).normal(size=(2, 20))
    expected = np.sort(values, axis=-1)[:, :worst].mean(-1)
    np.testing.assert_allclose(tail_contributions(values, level).mean(-1), expected)
    between = tail_contributions(np.array([1.0, 2.0, 3.0, 4.0]), 0.375)  # one value and a half
    assert between.mean() == pytest.approx((1.0 + 0.5 * 2.0) / 1.5)


def test_a_quantile_lies_between_two_order_statistics() -> None:
    """Of 100 values at most 4 are below the 10 % quantile with 2.4 %, and at least 17 with 2.1 %."""
    values = np.random.default_rng(4).permutation(np.arange(1.0, 101.0))[np.newaxis]
    assert [float(each) for each in quantile_interval(values, 0.1)] == [10.0, 5.0, 17.0]
    assert stats.binom.cdf([3, 4, 15, 16], 100, 0.1) == pytest.approx([0.0078, 0.0237, 0.9601, 0.9794], abs=1e-4)
    assert quantile_interval(values[:, :20], 0.1)[1] == -np.inf, "no value may be below it"
    runs = np.concatenate([values, values + 2.0])
    centre, low, _ = quantile_interval(runs, 0.1)
    assert (centre, low) == (11.0, pytest.approx(11.0 - np.hypot(5.0, stats.t.ppf(0.975, 1))))


@pytest.mark.parametrize("n_episodes", [200, 1000])
@pytest.mark.parametrize("name", ["normal", "heavy"])
def test_intervals_of_the_tail_miss_the_truth_about_as_rarely_as_promised(name: str, n_episodes: int) -> None:
    rng = np.random.default_rng(5)
    many = rng.normal(size=(1000, 1, n_episodes))
    values, cvar, quantile = many, -1.754983, -1.281552
    if name == "heavy":  # negative exponential with mean 1: quantile log(0.1), beyond it one more
        values, quantile = np.log(stats.norm.cdf(many)), np.log(0.1)
        cvar = quantile - 1.0
    _, low, high = mean_interval(tail_contributions(values, 0.1))
    assert np.mean((low > cvar) | (high < cvar)) < 0.07
    missed = [not low <= quantile <= high for _, low, high in (quantile_interval(each, 0.1) for each in values[:300])]
    assert np.mean(missed) < 0.08
