"""Estimates of the returns of policies in logged episodes, with intervals, or a reason why there are none.

Arrays of the estimators are `[n_episodes, horizon]`, a column for each decision; after the end of an episode ratios
are 1 and everything else is 0. `rewards` are discounted to the start of the episode (`gamma**t * r_t`), and so are the
values `q` `Q(s_t, a_t)` and `v` `V(s_t)` of the evaluated policy; `v` has one more column, for what follows the last
decision of truncated episodes. `ratios` are the probability of each action under the evaluated policy, divided by that
under the policy that acted.

`weights` `[n_samples, n_episodes]` count how often each episode occurs in bootstrap samples; all estimators return
`[n_samples]`. The estimate itself is that of `np.ones((1, n_episodes))`.

Precup et al. 2000 (importance sampling), Jiang and Li 2016 (doubly robust), Thomas and Brunskill 2016 (weighted doubly
robust, MAGIC).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from maze.core.agent.action_distribution import allowed_actions, distributions_of, log_probabilities
from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.policy import Policy
from maze.core.env.action_conversion import ActionBounds
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import Array, LoggedSteps
from maze.core.utils.config_utils import number, whole_number
from maze.core.utils.seeding import seeded_generator
from maze.core.utils.stats_utils import Estimate
from maze.distributions.utils import isolated_global_generator
from maze.offline.fitted_q import FittedQConfig, FittedValues, fit_q

BEHAVIOUR = "behaviour"
"""Row of a table with the return of the logged episodes themselves."""
_FITS_AT_ONCE = 16  # whose values of all decisions are kept in memory at the same time


class Logged(NamedTuple):
    """Inputs of the estimators; see the module docstring."""

    rewards: Array
    ratios: Array
    q: Array
    v: Array


def cumulative_ratios(ratios: Array) -> Array:
    """Return the ratio of the probabilities of all actions up to each decision, `[n_episodes, horizon]`.

    :param ratios: Ratios of single actions, `[n_episodes, horizon]`. Products beyond the range of floats are infinite,
        and NaN after a zero.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.cumprod(ratios, axis=1))


def importance_sampling(logged: Logged, weights: Array) -> Array:
    """Return the mean of the returns, weighted by the ratio of the whole episode."""
    return _mean(importance_sampling_terms(logged), weights)


def importance_sampling_terms(logged: Logged) -> Array:
    """Return the weighted return of each episode, `[n_episodes]`."""
    return np.asarray(cumulative_ratios(logged.ratios)[:, -1] * logged.rewards.sum(1))


def weighted_importance_sampling(logged: Logged, weights: Array) -> Array:
    """Estimate as importance sampling, divided by the sum of the ratios instead of the number of episodes."""
    ratio = cumulative_ratios(logged.ratios)[:, -1]
    return _ratio(weights @ (ratio * logged.rewards.sum(1)), weights @ ratio)


def per_decision(logged: Logged, weights: Array) -> Array:
    """Weight each reward by the ratio of the decisions up to it."""
    return _mean(per_decision_terms(logged), weights)


def per_decision_terms(logged: Logged) -> Array:
    """Return the sum of the weighted rewards of each episode, `[n_episodes]`."""
    return np.asarray((cumulative_ratios(logged.ratios) * logged.rewards).sum(1))


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
    """Return the contribution of each episode to the doubly robust estimate, `[n_episodes]`."""
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

    :param logged: See the module docstring.
    :param weights: `[n_samples, n_episodes]`. The mixture itself is that of all episodes, in every sample.
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

    :param ratios: `[n_episodes]`, not negative. The number is 0 where they are beyond the range of floats.
    """
    scale = float(ratios.max(initial=0.0))
    if not 0.0 < scale < math.inf:  # the product of many ratios may be infinite, or NaN after a zero
        return 0.0
    scaled = ratios / scale
    return float(scaled.sum() ** 2 / (scaled**2).sum())


def bootstrap_weights(n_episodes: int, n_samples: int, rng: np.random.Generator) -> Array:
    """Return how often each episode occurs in samples with replacement.

    :param n_episodes: Number of episodes, and size of each sample.
    :param n_samples: Number of samples.
    :param rng: Generator, which is advanced.
    :return: float64 `[n_samples, n_episodes]`; each row adds up to `n_episodes`.
    """
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


ESTIMATORS: Mapping[str, Callable[[Logged, Array], Array]] = {
    "fqe": direct_method,
    "is": importance_sampling,
    "wis": weighted_importance_sampling,
    "pdis": per_decision,
    "wpdis": weighted_per_decision,
    "dr": doubly_robust,
    "wdr": weighted_doubly_robust,
    "magic": magic,
}
"""Estimators by name; all but `fqe` weight logged actions by the ratios of their probabilities."""
FITTED = frozenset({"fqe", "dr", "wdr", "magic"})
"""Estimators that use fitted values."""
_TERMS = {"is": importance_sampling_terms, "pdis": per_decision_terms, "dr": doubly_robust_terms}
"""Contributions of the episodes to the estimators by weighting that are their means."""


@dataclass(frozen=True)
class EstimationConfig:
    """Settings of the estimation.

    :param gamma: Discount per environment step.
    :param estimators: Names of the estimators.
    :param n_bootstrap: Bootstrap samples of the episodes.
    :param min_effective_episodes: Estimates that weight episodes are refused below this effective sample size.
    :param max_unsupported: Estimates are refused where the policy would take actions that the log cannot contain more
        often than this.
    :param greedy: Evaluate the greedy actions of torch policies instead of their distributions.
    :param fitted_q: Settings of fitted Q evaluation.
    :param seed: Seed of bootstrap samples, networks and sampled actions.
    """

    gamma: float = 0.99
    estimators: tuple[str, ...] = tuple(ESTIMATORS)
    n_bootstrap: int = 200
    min_effective_episodes: float = 50.0
    max_unsupported: float = 0.1
    greedy: bool = False
    fitted_q: FittedQConfig = field(default_factory=FittedQConfig)
    seed: int = 1234

    def __post_init__(self) -> None:
        number("gamma", self.gamma, 0.0, 1.0)
        whole_number("n_bootstrap", self.n_bootstrap, at_least=2)
        if unknown := [name for name in self.estimators if name not in ESTIMATORS]:
            raise ConfigError(f"estimators: {unknown} are unknown. Expected some of {list(ESTIMATORS)}.")


@dataclass(frozen=True)
class PolicyEstimate:
    """The estimated discounted return of an episode under a policy.

    :param policy: Name of the policy.
    :param estimator: Name of the estimator.
    :param estimate: Value with its 95 % interval by bootstrap over episodes; NaN where it is refused.
    :param bernstein: Empirical Bernstein interval, for estimators that are means over episodes; `None`: there is none.
    :param effective_episodes: Number of equally weighted episodes that the weighted ones are worth; that of the logged
        episodes for estimators without weights.
    :param largest_weight: Largest share of one episode in the sum of the weights.
    :param unsupported: Share of the policy's decisions whose actions the log cannot contain; without propensities,
        those that it does not contain (:func:`unlogged_share`).
    :param refusal: Why there is no estimate, and what would help; empty: there is one.
    :param samples: Estimates in the bootstrap samples, which are the same for all policies and estimators.
    """

    policy: str
    estimator: str
    estimate: Estimate
    bernstein: tuple[float, float] | None
    effective_episodes: float
    largest_weight: float
    unsupported: float
    refusal: str = ""
    samples: Array = field(default_factory=lambda: np.empty(0), repr=False, compare=False)


@dataclass(frozen=True)
class Weighting:
    """Weights of the logged episodes under a policy.

    :param ratios: Probabilities of the logged actions under the policy, divided by those under the behaviour policy,
        `[n_decisions]`; NaN where the latter are unknown.
    :param effective_episodes: See :class:`PolicyEstimate`.
    :param largest_weight: See :class:`PolicyEstimate`.
    :param unsupported: See :class:`PolicyEstimate`; NaN where propensities are unknown.
    :param lost_weight: Difference between the expected mean weight of the episodes, 1, and the mean of the log, beyond
        two standard errors; above 0, the log lacks rare episodes with large weights, as where both routes of a canary
        explore rarely.
    """

    ratios: Array
    effective_episodes: float
    largest_weight: float
    unsupported: float
    lost_weight: float = 0.0

    @classmethod
    def of(cls, data: LoggedSteps, log_probs: Array) -> Weighting:
        """Return the weighting of logged actions.

        The mean ratio of single decisions is, in expectation, the probability that the policy takes an action that the
        behaviour policy takes as well; the rest, up to 1, has no support.

        :param data: The logged decisions.
        :param log_probs: Log-probabilities of their actions under the policy, `[n_decisions]`.
        """
        ratios = np.exp(log_probs) / data.propensities
        if np.isnan(ratios).any():
            return cls(ratios, float("nan"), float("nan"), float("nan"))
        episode = cumulative_ratios(data.padded(ratios, 1.0))[:, -1]
        largest = float(episode.max() / episode.sum()) if 0.0 < episode.sum() < math.inf else float("nan")
        return cls(ratios, effective_sample_size(episode), largest, *map(_lacking, (ratios, episode)))


def _lacking(ratios: Array) -> float:
    """Return by how much the mean of ratios is below 1, less two standard errors; at least 0."""
    return max(0.0, 1.0 - float(ratios.mean()) - 2.0 * float(ratios.std() / np.sqrt(len(ratios))))


def cloned_propensities(
    data: LoggedSteps, action_spaces: Mapping[StepKeyType, spaces.Dict], seed: int, n_updates: int = 1000
) -> Array:
    """Estimate the probabilities of the logged actions by cloning the policy that acted, `[n_decisions]`.

    A small network for each sub-step key predicts the choices of each head from the observations. Masked choices have
    probability 0.

    :param data: The decisions.
    :param action_spaces: Action spaces by step key; all heads are `Discrete`.
    :param seed: Seed of initial weights and minibatches.
    :param n_updates: Gradient steps, of 256 decisions each.
    :raises ConfigError: A head is not `Discrete` from 0 on, or masks exclude actions of the log.
    """
    found, rng = np.empty(len(data)), np.random.default_rng(seed)
    for key, table in data.tables.items():
        n, heads = table.n_actions, action_spaces[key].spaces
        observations = {name: values[:n] for name, values in table.observations.items()}
        masks = allowed_actions(observations, action_spaces[key], {})
        allowed = torch.cat([torch.as_tensor(mask) for mask in masks.values()], 1)
        seen = np.concatenate([np.asarray(values, np.float32).reshape(n, -1) for values in observations.values()], 1)
        inputs = torch.from_numpy((seen - seen.mean(0)) / np.maximum(seen.std(0), 1e-6))
        with isolated_global_generator(seeded_generator(int(rng.integers(2**31)))):
            network = nn.Sequential(nn.Linear(inputs.shape[1], 64), nn.ReLU(), nn.Linear(64, allowed.shape[1]))
        sizes = [mask.shape[1] for mask in masks.values()]
        taken = torch.stack([torch.as_tensor(table.actions[head].astype(np.int64)) for head in heads], 1)

        def log_probs(rows: torch.Tensor) -> torch.Tensor:
            logits = network(inputs[rows]).masked_fill(~allowed[rows], torch.finfo(torch.float32).min)  # noqa: B023
            parts = zip(logits.split(sizes, 1), taken[rows].unbind(1), strict=True)  # noqa: B023
            return torch.stack([-nn.functional.cross_entropy(part, a, reduction="none") for part, a in parts]).sum(0)

        optimizer = FlatAdam({"clone": network}, 2e-3, eps=1e-8)
        for _ in range(n_updates):
            optimizer.zero_grad()
            (-log_probs(torch.from_numpy(rng.integers(n, size=256))).mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        with torch.inference_mode():
            found[data.positions(key)] = log_probs(torch.arange(n)).double().exp().numpy()
    if n_excluded := int((found == 0).sum()):
        raise ConfigError(f"behaviour=cloned: masks exclude {n_excluded} of {len(found)} logged actions. Correct them.")
    return found


def unlogged_share(
    data: LoggedSteps, policy: Policy, action_spaces: Mapping[StepKeyType, spaces.Dict], config: EstimationConfig
) -> float:
    """Return the share of a policy's decisions whose actions the log does not contain, without propensities.

    These are choices that were never logged, and numbers beyond the range of the logged ones, whatever was observed.

    :param data: The logged decisions.
    :param policy: A policy that acts on observations alone. One action is sampled for each decision.
    :param action_spaces: Action spaces by step key.
    :param config: Settings, of which `seed` and `greedy` are used.
    :return: In [0, 1].
    :raises ConfigError: The policy needs more than observations.
    """
    rng, n_unlogged = np.random.default_rng(config.seed), 0
    for key, chosen, distribution in distributions_of(data, policy, action_spaces, config.greedy):
        bounds, is_unlogged = ActionBounds(action_spaces[key]), np.zeros(len(chosen), np.bool_)
        for head, drawn in distribution.sample(rng).items():
            logged, values = data.tables[key].actions[head], bounds.clip_rows(head, drawn)
            is_choice = logged.dtype.kind == "i" and logged.ndim == 1
            missing = ~np.isin(values, logged) if is_choice else (values < logged.min(0)) | (values > logged.max(0))
            is_unlogged |= missing.reshape(len(chosen), -1).any(1)
        n_unlogged += int(is_unlogged.sum())
    return n_unlogged / len(data)


def estimate(
    policies: Mapping[str, Policy],
    data: LoggedSteps,
    action_spaces: Mapping[StepKeyType, spaces.Dict],
    config: EstimationConfig | None = None,
) -> list[PolicyEstimate]:
    """Estimate the discounted return of an episode under each policy, from logged episodes.

    Estimates with fitted values include the values after truncations; estimates by weighting end with the logged
    episodes.

    :param policies: The policies by name; they observe nothing but the logged observations.
    :param data: The logged episodes; weighting needs their propensities.
    :param action_spaces: Action spaces by step key.
    :param config: Settings.
    :return: The return of the log itself, then for each policy one entry for each estimator.
    :raises ConfigError: There is only one episode, or a policy needs more than observations.
    """
    config = config or EstimationConfig()
    if data.n_episodes < 2:
        raise ConfigError(f"estimate: expected at least two episodes, found {data.n_episodes}. Log more.")
    bootstrap = bootstrap_weights(data.n_episodes, config.n_bootstrap, np.random.default_rng(config.seed))
    returns = data.returns(config.gamma)
    logged = Estimate(float(returns.mean()), *_percentiles(bootstrap @ returns / bootstrap.sum(1)))
    n, bernstein = len(returns), empirical_bernstein(returns)
    entries = [PolicyEstimate(BEHAVIOUR, "mean", logged, bernstein, float(n), 1.0 / n, 0.0)]
    for name, policy in policies.items():
        weighting = Weighting.of(data, log_probabilities(data, policy, action_spaces, config.greedy))
        if np.isnan(weighting.unsupported):
            weighting = replace(weighting, unsupported=unlogged_share(data, policy, action_spaces, config))
        values = None
        if any(each in FITTED and not _refusal(each, data, weighting, config) for each in config.estimators):
            settings = (config.gamma, bootstrap, config.seed, config.fitted_q, config.greedy)
            values = fit_q(data, policy, action_spaces, *settings)
        entries += [_entry(name, each, data, weighting, values, bootstrap, config) for each in config.estimators]
    return entries


def _why_not_fitted(data: LoggedSteps, config: EstimationConfig) -> str:
    if not data.has_target.any():
        return (
            "All episodes were truncated after their first decision, and the log does not contain what followed, so "
            "that no values can be fitted. Log longer episodes, or estimate by `is` or `wis`."
        )
    if config.gamma == 1.0 and not data.terminated.any():
        return (
            "All episodes were truncated, and undiscounted returns of episodes that continue are infinite. Set "
            "`runner.gamma` below 1, or `runner.truncation_ends=true` if a time limit of the problem truncated them."
        )
    return ""


def _refusal(estimator: str, data: LoggedSteps, weighting: Weighting, config: EstimationConfig) -> str:
    if estimator in FITTED and (reason := _why_not_fitted(data, config)):
        return reason
    if estimator != "fqe" and np.isnan(weighting.ratios).any():
        return (
            "The log has no probabilities of its actions; deterministic continuous actions have no density. Name the "
            "policy that acted (`behaviour`), log sampled actions (`runner.record_parquet=true` with a network or "
            "`policy=exploring`; a server with `--explore`, or `deterministic: false` for continuous actions), or "
            "estimate by `fqe`, which needs none."
            if np.isnan(data.propensities).any()
            else "The policy's continuous actions are deterministic and have no density. Estimate by `fqe`."
        )
    if weighting.unsupported > config.max_unsupported:
        return (
            f"{weighting.unsupported:.0%} of the policy's decisions are actions that the log does not contain (at most "
            f"{config.max_unsupported:.0%} are accepted). Log with more exploration."
        )
    if estimator != "fqe" and weighting.effective_episodes < config.min_effective_episodes:
        return (
            f"The weighted episodes are worth {weighting.effective_episodes:.1f} equally weighted ones (at least "
            f"{config.min_effective_episodes:g} are needed). Log more exploration or more and shorter episodes, or "
            f"estimate by `fqe`."
        )
    if estimator in ("is", "pdis") and weighting.lost_weight > config.max_unsupported:
        return (
            f"The weights of the episodes lack {weighting.lost_weight:.0%} of their expected sum: those with large "
            "weights are too rare for the log. Estimate by `wis` or `wpdis`, or log with more exploration."
        )
    return ""


def _entry(
    policy: str,
    estimator: str,
    data: LoggedSteps,
    weighting: Weighting,
    values: FittedValues | None,
    bootstrap: Array,
    config: EstimationConfig,
) -> PolicyEstimate:
    n, function, gamma = data.n_episodes, ESTIMATORS[estimator], config.gamma
    sizes = (float(n), 1.0 / n) if estimator == "fqe" else (weighting.effective_episodes, weighting.largest_weight)
    nothing = Estimate(float("nan"), float("nan"), float("nan"))
    if refusal := _refusal(estimator, data, weighting, config):
        return PolicyEstimate(policy, estimator, nothing, None, *sizes, weighting.unsupported, refusal)
    rewards = data.padded(data.rewards * gamma**data.steps, 0.0)
    zeros = np.zeros((n, rewards.shape[1] + 1))
    logged = unfitted = Logged(rewards, data.padded(weighting.ratios, 1.0), zeros[:, 1:], zeros)
    if values is None or estimator not in FITTED:
        sampled = function(logged, bootstrap)
    else:
        if estimator == "fqe":  # needs the values of the first observations only
            first = data.episode_starts[:-1]
            of_first = values.of_observations[first] @ values.coefficients.T * gamma ** data.steps[first, None]
            fits = (unfitted._replace(v=each[:, None]) for each in of_first.T)
        else:
            blocks = (slice(first, first + _FITS_AT_ONCE) for first in range(0, 1 + len(bootstrap), _FITS_AT_ONCE))
            fits = (each for block in blocks for each in with_values(unfitted, data, values, gamma, block))
        logged = next(fits)
        sampled = np.concatenate([function(each, row[np.newaxis]) for each, row in zip(fits, bootstrap, strict=True)])
    estimate = Estimate(float(function(logged, np.ones((1, n)))[0]), *_percentiles(sampled))
    limit = data.largest_return(gamma)
    least, most = (sign * limit if (sign * data.rewards > 0).any() else 0.0 for sign in (-1.0, 1.0))
    if estimator in FITTED and (estimate.low < least < most < estimate.high or np.abs(estimate).max() > 2.0 * limit):
        found = f"{estimate.value:.4g} [{estimate.low:.4g}, {estimate.high:.4g}]"
        refusal = (
            f"The fitted values diverge: the estimate is {found}, but the rewards of the log allow returns from "
            f"{least:.4g} to {most:.4g}. The log may not show what follows its last decisions. If a time limit of the "
            "problem truncated the episodes, set `runner.truncation_ends=true`; otherwise log more or longer episodes, "
            "or set a smaller `runner.gamma`."
        )
        return PolicyEstimate(policy, estimator, nothing, None, *sizes, weighting.unsupported, refusal)
    bernstein = empirical_bernstein(_TERMS[estimator](logged)) if estimator in _TERMS else None
    return PolicyEstimate(policy, estimator, estimate, bernstein, *sizes, weighting.unsupported, samples=sampled)


def with_values(logged: Logged, data: LoggedSteps, values: FittedValues, gamma: float, fits: slice) -> Iterator[Logged]:
    """Yield the arrays with the fitted values of some fits.

    :param logged: The arrays.
    :param data: The logged decisions.
    :param values: Fitted values.
    :param gamma: Discount per environment step.
    :param fits: 0: the values fitted to all episodes; others: those fitted to bootstrap samples.
    """
    discounts = gamma**data.steps
    for of_actions, of_observations, of_ends in zip(*(part.T for part in values.of(fits)), strict=True):
        # without a known target a decision corrects nothing
        q = data.padded(np.where(data.has_target, of_actions, data.rewards) * discounts, 0.0)
        v = np.zeros_like(logged.v)
        v[:, :-1] = data.padded(of_observations * discounts, 0.0)
        v[np.arange(len(v)), data.lengths] = of_ends * discounts[data.episode_starts[1:] - 1]
        yield logged._replace(q=q, v=v)


def _percentiles(sampled: Array) -> Iterable[float]:
    return map(float, np.quantile(sampled, (0.025, 0.975)))
