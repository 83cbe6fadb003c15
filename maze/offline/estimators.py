"""Off-policy estimators of a policy's return, as functions of arrays.

Arrays are `[n_episodes, horizon]`, a column for each decision; behind the end of an episode ratios are 1 and everything
else is 0. `rewards` are discounted to the start of the episode (`gamma**t * r_t`), and so are the values `q`
`Q(s_t, a_t)` and `v` `V(s_t)` of the evaluated policy; `v` has one more column, for what follows the last decision of
truncated episodes. `ratios` are the probability of each action under the evaluated policy, divided by that under the
policy that acted.

`weights` `[n_samples, n_episodes]` count how often each episode occurs in bootstrap samples; all estimators return
`[n_samples]`. The estimate itself is that of `np.ones((1, n_episodes))`.

Precup et al. 2000 (importance sampling), Jiang and Li 2016 (doubly robust), Thomas and Brunskill 2016 (weighted doubly
robust, MAGIC).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Logged(NamedTuple):
    """What the estimators take; see the module."""

    rewards: Array
    ratios: Array
    q: Array
    v: Array


def cumulative_ratios(ratios: Array) -> Array:
    """Return the ratio of the probabilities of all actions up to each decision, `[n_episodes, horizon]`."""
    return np.asarray(np.cumprod(ratios, axis=1))


def importance_sampling(logged: Logged, weights: Array) -> Array:
    """Return the mean of the returns, weighted by the ratio of the whole episode."""
    episode = cumulative_ratios(logged.ratios)[:, -1] * logged.rewards.sum(1)
    return _mean(episode, weights)


def weighted_importance_sampling(logged: Logged, weights: Array) -> Array:
    """Estimate as importance sampling, divided by the sum of the ratios instead of the number of episodes."""
    ratio = cumulative_ratios(logged.ratios)[:, -1]
    return _ratio(weights @ (ratio * logged.rewards.sum(1)), weights @ ratio)


def per_decision(logged: Logged, weights: Array) -> Array:
    """Weight each reward by the ratio of the decisions up to it."""
    return _mean((cumulative_ratios(logged.ratios) * logged.rewards).sum(1), weights)


def weighted_per_decision(logged: Logged, weights: Array) -> Array:
    """Estimate as per-decision importance sampling, with ratios divided by their mean at each decision."""
    ratios = cumulative_ratios(logged.ratios)
    return np.asarray(_ratio(weights @ (ratios * logged.rewards), weights @ ratios).sum(1))


def direct_method(logged: Logged, weights: Array) -> Array:
    """Return the mean of the fitted values of the first observations."""
    return _mean(logged.v[:, 0], weights)


def doubly_robust(logged: Logged, weights: Array) -> Array:
    """Return the fitted values, corrected by the weighted errors of the fit (Jiang and Li 2016, eq. 10)."""
    return _mean(doubly_robust_terms(logged), weights)


def doubly_robust_terms(logged: Logged) -> Array:
    """Return what each episode contributes to the doubly robust estimate, `[n_episodes]`."""
    return np.asarray(logged.v[:, 0] + (cumulative_ratios(logged.ratios) * _errors(logged)).sum(1))


def weighted_doubly_robust(logged: Logged, weights: Array) -> Array:
    """Estimate as doubly robust, with ratios divided by their mean at each decision (Thomas, Brunskill 2016)."""
    ratios = cumulative_ratios(logged.ratios)
    correction = _ratio(weights @ (ratios * _errors(logged)), weights @ ratios).sum(1)
    return np.asarray(direct_method(logged, weights) + correction)


def magic(logged: Logged, weights: Array, n_lengths: int = 8) -> Array:
    """Return the mixture of weighted doubly robust estimates that correct different numbers of decisions.

    The mixture minimises the estimated mean squared error (Thomas and Brunskill 2016, section 6): squared distance from
    the interval of the estimate that corrects all decisions, plus covariance.

    :param n_lengths: Number of different numbers of decisions, from none to all.
    """
    n_episodes, horizon = logged.rewards.shape
    lengths = np.unique(np.linspace(0, horizon, n_lengths).round().astype(np.int64))
    ratios = cumulative_ratios(logged.ratios)
    errors = _errors(logged)
    partial = np.cumsum(_ratio(ratios, np.broadcast_to(ratios.mean(0), ratios.shape)) * errors, axis=1)
    terms = logged.v[:, :1] + np.concatenate([np.zeros((n_episodes, 1)), partial], 1)[:, lengths]
    covariance = np.atleast_2d(np.cov(terms, rowvar=False)) / n_episodes
    means = terms.mean(0)
    half = 1.96 * math.sqrt(max(covariance[-1, -1], 0.0))
    bias = np.maximum(np.abs(means - means[-1]) - half, 0.0)
    mixture = _simplex_minimum(covariance + np.outer(bias, bias))
    corrections = np.cumsum(_ratio(weights @ (ratios * errors), weights @ ratios), axis=1)
    by_length = np.concatenate([np.zeros((len(weights), 1)), corrections], 1)[:, lengths]
    return np.asarray((direct_method(logged, weights)[:, None] + by_length) @ mixture)


def effective_sample_size(ratios: Array) -> float:
    """Return the number of equally weighted episodes that weighted ones are worth: `(sum w)**2 / sum w**2` (Kish 1965).

    :param ratios: `[n_episodes]`, not negative.
    """
    scale = float(ratios.max(initial=0.0))
    if not scale > 0:
        return 0.0
    scaled = ratios / scale
    return float(scaled.sum() ** 2 / (scaled**2).sum())


def bootstrap_weights(n_episodes: int, n_samples: int, rng: np.random.Generator) -> Array:
    """Return how often each episode occurs in samples with replacement, `[n_samples, n_episodes]`."""
    return rng.multinomial(n_episodes, np.full(n_episodes, 1.0 / n_episodes), size=n_samples).astype(np.float64)


def empirical_bernstein(values: Array, alpha: float = 0.05) -> tuple[float, float]:
    """Return a confidence interval of the mean from variance and range of the values (Maurer and Pontil 2009, thm. 4).

    The range is that of the values, as that of weighted returns is unknown: the interval assumes that no larger ones
    exist.

    :param values: `[n]`, at least two.
    :param alpha: Probability of missing the mean, both sides together.
    """
    n = len(values)
    confidence = math.log(4.0 / alpha)
    width = math.sqrt(2.0 * values.var(ddof=1) * confidence / n) + 7.0 * np.ptp(values) * confidence / (3.0 * (n - 1))
    mean = float(values.mean())
    return mean - float(width), mean + float(width)


def _errors(logged: Logged) -> Array:
    """Return the discounted temporal-difference errors of the fitted values: `r_t + v_(t+1) - q_t`."""
    return np.asarray(logged.rewards + logged.v[:, 1:] - logged.q)


def _mean(values: Array, weights: Array) -> Array:
    return np.asarray(weights @ values / weights.sum(1))


def _ratio(numerator: Array, denominator: Array) -> Array:
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _simplex_minimum(matrix: Array) -> Array:
    """Return the mixture `x` (not negative, sum 1) that minimises `x' A x`.

    :param matrix: Symmetric, positive semidefinite, `[n, n]`.
    """
    from scipy.optimize import nnls

    n = len(matrix)
    scale = max(float(np.trace(matrix)) / n, 1e-300)
    root = np.linalg.cholesky(matrix / scale + 1e-9 * np.eye(n)).T
    mixture, _ = nnls(np.concatenate([root, np.full((1, n), 1e3)]), np.append(np.zeros(n), 1e3))
    return np.asarray(mixture / mixture.sum())
