"""Estimates of what policies would have achieved in logged episodes, with intervals, or a reason why there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import LoggedSteps
from maze.offline import estimators as ope
from maze.offline.action_probabilities import action_distribution
from maze.offline.fitted_q import Array, FittedQConfig, FittedValues, fit_q
from maze.report.estimates import Estimate

BEHAVIOUR = "behaviour"
"""Row of a table with the return of the logged episodes themselves."""


@dataclass(frozen=True)
class Estimator:
    """One way of estimating.

    :param name: Short name.
    :param function: See :mod:`maze.offline.estimators`.
    :param needs_ratios: It weights logged actions by their probabilities.
    :param needs_values: It uses fitted values.
    """

    name: str
    function: Callable[[ope.Logged, Array], Array]
    needs_ratios: bool
    needs_values: bool


ESTIMATORS = {
    estimator.name: estimator
    for estimator in (
        Estimator("fqe", ope.direct_method, False, True),
        Estimator("is", ope.importance_sampling, True, False),
        Estimator("wis", ope.weighted_importance_sampling, True, False),
        Estimator("pdis", ope.per_decision, True, False),
        Estimator("wpdis", ope.weighted_per_decision, True, False),
        Estimator("dr", ope.doubly_robust, True, True),
        Estimator("wdr", ope.weighted_doubly_robust, True, True),
        Estimator("magic", ope.magic, True, True),
    )
}


@dataclass(frozen=True)
class EstimationConfig:
    """Settings of the estimation."""

    gamma: float = 0.99
    """Discount per environment step."""
    estimators: tuple[str, ...] = tuple(ESTIMATORS)
    """Names of the estimators."""
    n_bootstrap: int = 200
    """Bootstrap samples of the episodes."""
    min_effective_episodes: float = 50.0
    """Estimates that weight episodes are refused below this effective sample size."""
    max_unsupported: float = 0.1
    """Estimates are refused where the policy would take actions that the log cannot contain more often than this."""
    greedy: bool = False
    """Evaluate the greedy actions of torch policies instead of their distributions."""
    fitted_q: FittedQConfig = field(default_factory=FittedQConfig)
    """Settings of fitted Q evaluation."""
    seed: int = 1234
    """Of bootstrap samples, networks and sampled actions."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.gamma <= 1.0:
            raise ConfigError(f"gamma: expected a number in [0, 1], found {self.gamma}.")
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
    :param unsupported: Share of the policy's decisions whose actions the log cannot contain.
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
    """How the actions of a policy weigh the logged episodes.

    :param ratios: Probabilities of the logged actions under the policy, divided by those under the behaviour policy,
        `[n_decisions]`; NaN where the latter are unknown.
    :param effective_episodes: See :class:`PolicyEstimate`.
    :param largest_weight: See :class:`PolicyEstimate`.
    :param unsupported: See :class:`PolicyEstimate`; NaN where propensities are unknown.
    """

    ratios: Array
    effective_episodes: float
    largest_weight: float
    unsupported: float

    @classmethod
    def of(cls, data: LoggedSteps, log_probs: Array) -> Weighting:
        """Return the weighting of logged actions.

        The mean ratio of single decisions is, in expectation, the probability that the policy takes an action that the
        behaviour policy takes as well; what it lacks to 1 has no support.

        :param data: The logged decisions.
        :param log_probs: Log-probabilities of their actions under the policy, `[n_decisions]`.
        """
        ratios = np.exp(log_probs) / data.propensities
        if np.isnan(ratios).any():
            return cls(ratios, float("nan"), float("nan"), float("nan"))
        episode = ope.cumulative_ratios(data.padded(ratios, 1.0))[:, -1]
        largest = float(episode.max() / episode.sum()) if episode.sum() > 0 else float("nan")
        standard_error = float(ratios.std() / np.sqrt(len(ratios)))
        missing = 1.0 - float(ratios.mean()) - 2.0 * standard_error
        return cls(ratios, ope.effective_sample_size(episode), largest, max(0.0, missing))


def log_probabilities(
    data: LoggedSteps, policy: Policy, action_spaces: Mapping[StepKeyType, spaces.Dict], greedy: bool = False
) -> Array:
    """Return log-probabilities (densities) of the logged actions under a policy, `[n_decisions]`."""
    found = np.empty(len(data))
    for key, table in data.tables.items():
        positions = data.positions(key)
        for agent in np.unique(data.agent_ids[positions]):
            chosen = positions[data.agent_ids[positions] == agent]
            rows = data.rows[chosen]
            observations = {name: values[rows] for name, values in table.observations.items()}
            actions = {head: values[rows] for head, values in table.actions.items()}
            distribution = action_distribution(
                policy, observations, ActorID(key, int(agent)), action_spaces[key], greedy
            )
            found[chosen] = distribution.log_prob(actions)
    return found


def estimate(
    policies: Mapping[str, Policy],
    data: LoggedSteps,
    action_spaces: Mapping[StepKeyType, spaces.Dict],
    config: EstimationConfig | None = None,
) -> list[PolicyEstimate]:
    """Estimate the discounted return of an episode under each policy, from logged episodes.

    Values of what follows truncated episodes are part of the estimates with fitted values; estimates by weighting alone
    end where the log ends.

    :param policies: The policies by name; they act on observations alone.
    :param data: The logged episodes; weighting needs their propensities.
    :param action_spaces: Action spaces by step key.
    :param config: Settings.
    :return: The return of the log itself, then for each policy one entry for each estimator.
    :raises ConfigError: There is only one episode, or a policy needs more than observations.
    """
    config = config or EstimationConfig()
    if data.n_episodes < 2:
        raise ConfigError(f"estimate: expected at least two episodes, found {data.n_episodes}.")
    rng = np.random.default_rng(config.seed)
    bootstrap = ope.bootstrap_weights(data.n_episodes, config.n_bootstrap, rng)
    entries = [_behaviour(data, bootstrap, config.gamma)]
    for name, policy in policies.items():
        weighting = Weighting.of(data, log_probabilities(data, policy, action_spaces, config.greedy))
        chosen = [ESTIMATORS[each] for each in config.estimators]
        values = None
        if any(estimator.needs_values and not _refusal(estimator, weighting, config) for estimator in chosen):
            settings = (config.gamma, bootstrap, config.seed, config.fitted_q, config.greedy)
            values = fit_q(data, policy, action_spaces, *settings)
        entries += [_entry(name, each, data, weighting, values, bootstrap, config) for each in chosen]
    return entries


def _behaviour(data: LoggedSteps, bootstrap: Array, gamma: float) -> PolicyEstimate:
    returns = data.returns(gamma)
    sampled = bootstrap @ returns / bootstrap.sum(1)
    estimate = Estimate(float(returns.mean()), *_percentiles(sampled))
    bernstein = ope.empirical_bernstein(returns)
    return PolicyEstimate(BEHAVIOUR, "mean", estimate, bernstein, float(len(returns)), 1.0 / len(returns), 0.0)


def _refusal(estimator: Estimator, weighting: Weighting, config: EstimationConfig) -> str:
    if estimator.needs_ratios and np.isnan(weighting.ratios).any():
        return (
            "The log has no probabilities of its actions. Log them (`maze-serve --explore`), or estimate by `fqe`, "
            "which needs none."
        )
    if weighting.unsupported > config.max_unsupported:
        return (
            f"{weighting.unsupported:.0%} of the policy's decisions are actions that the log does not contain (at most "
            f"{config.max_unsupported:.0%} are accepted). Log with more exploration."
        )
    if estimator.needs_ratios and weighting.effective_episodes < config.min_effective_episodes:
        return (
            f"The weighted episodes are worth {weighting.effective_episodes:.1f} equally weighted ones (at least "
            f"{config.min_effective_episodes:g} are needed). Log more exploration or more and shorter episodes, or "
            f"estimate by `fqe`."
        )
    return ""


def _entry(
    policy: str,
    estimator: Estimator,
    data: LoggedSteps,
    weighting: Weighting,
    values: FittedValues | None,
    bootstrap: Array,
    config: EstimationConfig,
) -> PolicyEstimate:
    n_episodes = float(data.n_episodes)
    effective = weighting.effective_episodes if estimator.needs_ratios else n_episodes
    largest = weighting.largest_weight if estimator.needs_ratios else 1.0 / n_episodes
    refusal = _refusal(estimator, weighting, config)
    if refusal:
        nothing = Estimate(float("nan"), float("nan"), float("nan"))
        return PolicyEstimate(policy, estimator.name, nothing, None, effective, largest, weighting.unsupported, refusal)
    logged = arranged(data, weighting.ratios, values, config.gamma)
    value = float(estimator.function(logged, np.ones((1, data.n_episodes)))[0])
    if estimator.needs_values:
        refitted = (with_values(logged, data, values, config.gamma, 1 + b) for b in range(len(bootstrap)))
        sampled = np.concatenate(
            [estimator.function(each, row[np.newaxis]) for each, row in zip(refitted, bootstrap, strict=True)]
        )
    else:
        sampled = estimator.function(logged, bootstrap)
    return PolicyEstimate(
        policy,
        estimator.name,
        Estimate(value, *_percentiles(sampled)),
        _bernstein(estimator.name, logged),
        effective,
        largest,
        weighting.unsupported,
        samples=sampled,
    )


def arranged(data: LoggedSteps, ratios: Array, values: FittedValues | None, gamma: float) -> ope.Logged:
    """Return the arrays that estimators take.

    :param data: The logged decisions.
    :param ratios: `[n_decisions]`.
    :param values: Fitted values; `None`: zeros.
    :param gamma: Discount per environment step.
    """
    rewards = data.padded(data.rewards * gamma**data.steps, 0.0)
    nothing = np.zeros((len(rewards), rewards.shape[1] + 1))
    logged = ope.Logged(rewards, data.padded(ratios, 1.0), nothing[:, 1:], nothing)
    return with_values(logged, data, values, gamma)


def with_values(
    logged: ope.Logged, data: LoggedSteps, values: FittedValues | None, gamma: float, fit: int = 0
) -> ope.Logged:
    """Return the arrays with fitted values.

    :param logged: The arrays.
    :param data: The logged decisions.
    :param values: Fitted values; `None`: the arrays stay.
    :param gamma: Discount per environment step.
    :param fit: 0: the values fitted to all episodes; others: those fitted to bootstrap samples.
    """
    if values is None:
        return logged
    discounts = gamma**data.steps
    of_actions, of_observations, of_ends = values.of(fit)
    # without a known target a decision corrects nothing
    q = data.padded(np.where(data.has_target, of_actions, data.rewards) * discounts, 0.0)
    v = np.zeros_like(logged.v)
    v[:, :-1] = data.padded(of_observations * discounts, 0.0)
    v[np.arange(len(v)), data.lengths] = of_ends * discounts[data.episode_starts[1:] - 1]
    return logged._replace(q=q, v=v)


def _bernstein(name: str, logged: ope.Logged) -> tuple[float, float] | None:
    ratios = ope.cumulative_ratios(logged.ratios)
    if name == "is":
        return ope.empirical_bernstein(ratios[:, -1] * logged.rewards.sum(1))
    if name == "pdis":
        return ope.empirical_bernstein((ratios * logged.rewards).sum(1))
    if name == "dr":
        return ope.empirical_bernstein(ope.doubly_robust_terms(logged))
    return None


def _percentiles(sampled: Array) -> Iterable[float]:
    return map(float, np.quantile(sampled, (0.025, 0.975)))
