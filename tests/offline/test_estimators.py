"""Off-policy estimators: equal to plain derivations in loops, unbiased where theory says so, and honest refusals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.offline import estimate as ope


@st.composite
def logged(draw: st.DrawFn) -> ope.Logged:
    """Random episodes of different lengths."""
    n, horizon = draw(st.integers(2, 6)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lengths = rng.integers(1, horizon + 1, n)
    inside = np.arange(horizon) < lengths[:, None]
    v = np.zeros((n, horizon + 1))
    v[:, :-1] = np.where(inside, rng.normal(size=inside.shape), 0.0)
    v[np.arange(n), lengths] = rng.normal(size=n) * rng.integers(0, 2, n)
    return ope.Logged(
        rewards=np.where(inside, rng.normal(size=inside.shape), 0.0),
        ratios=np.where(inside, rng.exponential(size=inside.shape), 1.0),
        q=np.where(inside, rng.normal(size=inside.shape), 0.0),
        v=v,
    )


def plain(data: ope.Logged) -> dict[str, float]:
    """All estimates but MAGIC, in loops over episodes and decisions."""
    n, horizon = data.rewards.shape
    cumulative = [[float(np.prod(data.ratios[i, : t + 1])) for t in range(horizon)] for i in range(n)]
    sums = [sum(cumulative[i][t] for i in range(n)) for t in range(horizon)]
    found = dict.fromkeys(("is", "wis", "pdis", "wpdis", "dm", "dr", "wdr"), 0.0)
    for i in range(n):
        value = sum(data.rewards[i])
        found["is"] += cumulative[i][-1] * value / n
        found["wis"] += cumulative[i][-1] * value / sums[-1]
        found["dm"] += data.v[i, 0] / n
        found["dr"] += data.v[i, 0] / n
        found["wdr"] += data.v[i, 0] / n
        for t in range(horizon):
            error = data.rewards[i, t] + data.v[i, t + 1] - data.q[i, t]
            found["pdis"] += cumulative[i][t] * data.rewards[i, t] / n
            found["wpdis"] += cumulative[i][t] / sums[t] * data.rewards[i, t]
            found["dr"] += cumulative[i][t] * error / n
            found["wdr"] += cumulative[i][t] / sums[t] * error
    return found


FUNCTIONS = {
    "is": ope.importance_sampling,
    "wis": ope.weighted_importance_sampling,
    "pdis": ope.per_decision,
    "wpdis": ope.weighted_per_decision,
    "dm": ope.direct_method,
    "dr": ope.doubly_robust,
    "wdr": ope.weighted_doubly_robust,
}


@given(logged())
@settings(deadline=None)
def test_estimates_equal_a_plain_derivation(data: ope.Logged) -> None:
    expected = plain(data)
    for name, function in FUNCTIONS.items():
        found = function(data, np.ones((1, len(data.rewards))))
        assert found == pytest.approx(expected[name], rel=1e-9, abs=1e-9), name


@given(logged(), st.integers(0, 2**32 - 1))
@settings(deadline=None)
def test_weights_of_episodes_equal_repeated_episodes(data: ope.Logged, seed: int) -> None:
    weights = ope.bootstrap_weights(len(data.rewards), 2, np.random.default_rng(seed))
    for name, function in FUNCTIONS.items():
        found = function(data, weights)
        for row, sample in zip(weights, found, strict=True):
            chosen = np.repeat(np.arange(len(row)), row.astype(int))
            repeated = ope.Logged(*(array[chosen] for array in data))
            alone = function(repeated, np.ones((1, len(chosen))))
            assert sample == pytest.approx(alone[0], rel=1e-9, abs=1e-9), name


@given(logged())
@settings(deadline=None)
def test_equal_policies_need_no_values_and_no_weights(data: ope.Logged) -> None:
    same = data._replace(ratios=np.ones_like(data.ratios))
    everywhere = np.ones((1, len(data.rewards)))
    mean = data.rewards.sum(1).mean()
    for name in ("is", "wis", "pdis", "wpdis"):
        assert FUNCTIONS[name](same, everywhere) == pytest.approx(mean, abs=1e-9)
    without_values = same._replace(q=np.zeros_like(data.q), v=np.zeros_like(data.v))
    for name in ("dr", "wdr"):
        assert FUNCTIONS[name](without_values, everywhere) == pytest.approx(mean, abs=1e-9)


@given(logged())
@settings(deadline=None)
def test_doubly_robust_corrects_nothing_where_values_are_exact(data: ope.Logged) -> None:
    exact = data._replace(q=data.rewards + data.v[:, 1:])
    everywhere = np.ones((1, len(data.rewards)))
    for function in (ope.doubly_robust, ope.weighted_doubly_robust, ope.magic):
        assert function(exact, everywhere) == pytest.approx(data.v[:, 0].mean(), abs=1e-9)


def test_magic_trusts_the_model_where_weights_are_noise_and_the_weights_where_the_model_is_wrong() -> None:
    rng = np.random.default_rng(0)
    n, horizon = 2000, 10
    rewards = np.ones((n, horizon))
    v = np.broadcast_to(np.arange(horizon, -1, -1.0), (n, horizon + 1)).copy()
    ratios = rng.lognormal(-2.0, 2.0, (n, horizon))
    right = ope.Logged(rewards, ratios, v[:, :-1].copy(), v)
    assert ope.magic(right, np.ones((1, n))) == pytest.approx(10.0)
    wrong = ope.Logged(rewards, np.ones_like(rewards), v[:, :-1] + 50.0, v + 50.0 * (v > 0))
    assert ope.magic(wrong, np.ones((1, n))) == pytest.approx(10.0, abs=0.5)


def test_the_effective_sample_size_matches_hand_worked_values() -> None:
    assert ope.effective_sample_size(np.ones(7)) == pytest.approx(7.0)
    assert ope.effective_sample_size(np.array([3.0, 1.0])) == pytest.approx(16 / 10)
    assert ope.effective_sample_size(np.zeros(3)) == 0.0
    assert ope.effective_sample_size(np.array([1e300, 1e300])) == pytest.approx(2.0)


def test_weights_beyond_the_range_of_numbers_are_worth_no_episode() -> None:
    """10**400 is infinite in floating point, and NaN after an action of probability 0."""
    ratios = np.full((3, 400), [[10.0], [1.0], [0.5]])
    assert ope.effective_sample_size(ope.cumulative_ratios(ratios)[:, -1]) == 0.0
    ratios[0, -1] = 0.0
    assert ope.effective_sample_size(ope.cumulative_ratios(ratios)[:, -1]) == 0.0


def test_the_empirical_bernstein_interval_matches_hand_worked_values() -> None:
    # variance 1/3, range 1, n = 4, log(4 / 0.05) = 4.382
    low, high = ope.empirical_bernstein(np.array([0.0, 1.0, 0.0, 1.0]))
    assert (low + high) / 2 == pytest.approx(0.5)
    assert high - 0.5 == pytest.approx(np.sqrt(2 / 3 * np.log(80) / 4) + 7 * np.log(80) / 9)
