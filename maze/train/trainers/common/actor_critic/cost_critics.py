"""Critics of other quantities than the mean return: costs of constraints, and quantiles for CVaR as an objective."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maze.core.agent.policy import HiddenStates
from maze.core.agent.returns import GAE, ReturnFunction, Returns, Trajectories, gae
from maze.core.agent.state_critic_input_output import StateCriticInput
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.agent.torch_policy_output import PolicyOutput
from maze.core.agent.torch_state_critic import TorchStateCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.utils.checkpoint import Stateful
from maze.core.utils.stats_utils import tail_values
from maze.perception.blocks.general.input_conversion import RunningNormalizationBlock
from maze.perception.blocks.recurrent.recurrent_cell import Run
from maze.train.trainers.common.actor_critic.valuation import CostRows, PolicyBatch, RolloutBatch, value_rollout
from maze.train.trainers.common.config_classes import ActorCriticConfig, Risk
from maze.train.trainers.common.learning import UpdateStats, quantile_huber_loss, widen
from maze.train.trainers.common.model_selection.model_selection_base import Constraint, statistic_source
from maze.train.trainers.common.observation_statistics import CentredReturns, RewardScaling

logger = logging.getLogger(__name__)

# Weight of earlier violations in the proportional and derivative terms.
_SMOOTHING = 0.9
# Number of updates with the largest multiplier after which a constraint that is still violated is reported.
_UPDATES_AT_LIMIT = 20
# Half-width of the quadratic part of the quantile loss, in units of the rewards that are learned from.
_KAPPA = 0.1
# Number of samples of the return-to-go from which quantiles are learned, at each decision.
_N_SAMPLES = 10
# The quantile is estimated from so many episodes in the tail, the latest ones.
_TAIL_EPISODES = 20


class CostCritic:
    """A copy of the model's critic that learns other quantities than rewards.

    :param model: The model that is trained.
    """

    saved: ClassVar[tuple[str, ...]]
    """Attributes with plain values that belong to the state. The first is an array with a row for each environment."""

    def __init__(self, model: TorchActorCritic) -> None:
        shared = [m for net in model.critic.networks.values() for m in net.modules()]
        normalizing = {id(module): module for module in shared if isinstance(module, RunningNormalizationBlock)}
        self.critic: TorchStateCritic = copy.deepcopy(model.critic, normalizing)  # type: ignore[assignment]  # checked
        self.model = TorchActorCritic(model.policy, self.critic, model.device)
        self._hidden_states: HiddenStates | None = None

    def _prepare_hidden_states(self, n_envs: int) -> None:
        self._hidden_states = HiddenStates(n_envs, self.critic.state_sizes) if self.model.is_recurrent else None

    def _parts(self) -> dict[str, Stateful]:
        memory: dict[str, Stateful] = {} if self._hidden_states is None else {"memory": self._hidden_states}
        return {"critic": self.critic, **memory}

    def state_dict(self) -> dict[str, Any]:
        """Return critic and statistics."""
        own = {name: copy.copy(getattr(self, name)) for name in self.saved}
        return {**own, **{name: part.state_dict() for name, part in self._parts().items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore a state of :meth:`state_dict`."""
        for name in self.saved:
            setattr(self, name, copy.copy(state_dict[name]))
        self._prepare_hidden_states(len(getattr(self, self.saved[0])))
        for name, part in self._parts().items():
            if name in state_dict:
                part.load_state_dict(state_dict[name])

    def _add_costs(
        self, columns: RolloutColumns, batch: RolloutBatch, returns: ReturnFunction, sequence_length: int
    ) -> None:
        """Add advantages and targets of this critic to a batch of a rollout."""
        valued = value_rollout(self.model, columns, returns, self._hidden_states, sequence_length, are_joint=True)
        for part, of_costs in zip(batch.parts, valued.parts, strict=True):
            part.costs.append(CostRows(of_costs.old_values, of_costs.advantages, of_costs.targets))
            if part.sequences is not None and of_costs.sequences is not None:
                part.sequences.critic_states += of_costs.sequences.critic_states

    def predicted(self, part: PolicyBatch, position: int, policy_output: PolicyOutput) -> list[Tensor]:
        """Return the values of costs, with gradients, for each output of the critic `[n_rows, ...]`.

        :param part: A minibatch.
        :param position: Number of this critic among those of the costs of the minibatch.
        :param policy_output: Output of the policy for it, with embeddings that critics may share.
        """
        runs: Sequence[Run] = ()
        if part.sequences is not None:
            runs = part.sequences.all_at_once(self.model.device).critic
            n_runs = len(runs) // (1 + len(part.costs))
            runs = runs[n_runs * (1 + position) : n_runs * (2 + position)]
        return self.critic.predict_values(StateCriticInput.of_substeps(policy_output, part.substeps, runs)).values


# -- constraints -------------------------------------------------------------------------------------------------------


class PID(NamedTuple):
    """State of the control of a multiplier."""

    integral: float = 0.0
    violation: float | None = None
    """Smoothed; `None`: unknown so far."""
    multiplier: float = 0.0


def pid_step(pid: PID, violation: float, gains: Sequence[float], limit: float, smoothing: float = _SMOOTHING) -> PID:
    """Update a multiplier (Stooke et al. 2020, Responsive safety in reinforcement learning by PID Lagrangian methods,
    algorithm 2).

    :param pid: State before.
    :param violation: Measured violation, negative if the constraint holds.
    :param gains: Proportional, integral and derivative gain.
    :param limit: Largest multiplier, and largest integral.
    :param smoothing: Weight of the earlier smoothed violation.
    """
    proportional, integral_gain, derivative = gains
    before = violation if pid.violation is None else pid.violation
    smoothed = smoothing * before + (1.0 - smoothing) * violation
    integral = min(max(pid.integral + integral_gain * violation, 0.0), limit)
    control = proportional * smoothed + integral + derivative * max(smoothed - before, 0.0)
    return PID(integral, smoothed, min(max(control, 0.0), limit))


def combined_advantage(reward: Tensor, costs: Sequence[Tensor], multipliers: Sequence[float]) -> Tensor:
    """Return the advantage of the Lagrangian, `(A - sum(l_i A_i)) / (1 + sum(l_i))`, `[n_rows]` as its arguments.

    :param reward: Advantage `A` of the reward.
    :param costs: Advantage `A_i` of each constraint's cost.
    :param multipliers: Multiplier `l_i` of each constraint, at least 0.
    """
    for cost, multiplier in zip(costs, multipliers, strict=True):
        reward = reward - multiplier * cost
    return reward / (1.0 + sum(multipliers))


def sum_of_ended(values: np.ndarray, ended: np.ndarray, carried: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the sum of values over the episodes that ended, and the sums of the running episodes.

    :param values: `[n_ticks, n_envs]`.
    :param ended: An episode ended with the tick, bool `[n_ticks, n_envs]`.
    :param carried: Sums of the episodes that were running before, `[n_envs]`.
    """
    totals = np.cumsum(values, axis=0, dtype=np.float64) + carried
    last = len(ended) - 1 - ended[::-1].argmax(axis=0)
    done = np.where(ended.any(axis=0), totals[last, np.arange(ended.shape[1])], 0.0)
    return float(done.sum()), totals[-1] - done


class LearnedConstraint(CostCritic):
    """A constraint in training: its multiplier, and the critic of its costs.

    A constraint on a mean over episodes (`Constraint`) is a limit `sum(a) / sum(b) <= bound` on values of a rollout:

    * an event averaged over steps: `a` is its value in each step, `b` is 1 in each step;
    * an event summed over episodes: `a` likewise, `b` is 1 where an episode ends;
    * a KPI, or another statistic of a whole episode: both are known in the last step of the episode, `b` is 1 where
      the episode has it;
    * `x per y`: the values of `x` and of `y`, which is weighted by the number of episodes that have `x` over the number
      that have `y`: the ratio of the two means, as in evaluations.

    The cost of a step is `a - bound * b`, negated for `>=`. Its critic and its advantages are those of rewards. The
    Lagrange multiplier has PID control.

    :param text: The constraint, such as `late_share <= 0.05`.
    :param config: Hyperparameters.
    :param model: The model that is trained; the critic begins as a copy of its critic.
    :raises ConfigError: The constraint cannot be read, is an equation, or divides an average and a total.
    """

    saved = ("_carried", "_pid", "value", "_n_at_limit")

    def __init__(self, text: str, config: ActorCriticConfig, model: TorchActorCritic) -> None:
        super().__init__(model)
        self.constraint = constraint = Constraint.parse(text)
        if constraint.sign == "==":
            raise ConfigError(f"algorithm.constraints: expected `<=` or `>=`, found {constraint.text!r}.")
        self.name = constraint.name if constraint.per is None else f"{constraint.name}_per_{constraint.per}"
        self.sources = [statistic_source(name) for name in (constraint.name, constraint.per) if name is not None]
        if len({source.is_rate for source in self.sources}) > 1:
            raise ConfigError(
                "algorithm.constraints: expected two averages over steps or two totals of episodes, whose ratio is the "
                f"same in training and evaluation; found an average and a total in {constraint.text!r}."
            )
        self.sources += [source._replace(is_occurrence=True) for source in self.sources if source.of_some]
        self.sign = 1.0 if constraint.sign in ("<=", "<") else -1.0
        self.value = float("nan")
        """Latest value of the statistic in rollouts."""
        self._config = config
        self._scale = abs(constraint.bound) or 1.0
        self._aim = constraint.bound - self.sign * config.constraint_margin * self._scale
        self._pid = PID()
        self._returns = GAE(config.gamma, config.gae_lambda)
        if self.sources[0].at_end:
            self._returns = GAE(1.0, config.gae_lambda)
        self._scaling = RewardScaling(config.gamma, at_ends=self.sources[0].at_end)
        centring = config.reward_centering and not self.sources[0].at_end
        self._centred = CentredReturns(self._returns, config.reward_centering, is_scaled=True) if centring else None
        self._carried = np.zeros((0, 2))
        self._n_at_limit = 0

    @property
    def multiplier(self) -> float:
        """Weight of the costs in the objective; that of rewards is 1."""
        return float(PID(*self._pid).multiplier)

    def networks(self) -> Iterator[tuple[tuple[str, Any], nn.Module]]:
        """Return the critic networks, by the event that reports their gradient and by constraint and sub-step."""
        for key, network in self.critic.networks.items():
            yield ("constraint_critic_grad_norm", (self.name, key)), network

    def learn(self, columns: RolloutColumns, batch: RolloutBatch, first: int, is_fixed: bool) -> None:
        """Update the multiplier by a rollout, and add its cost advantages and targets to the rollout's batch.

        :param columns: The rollout.
        :param batch: The rollout with returns.
        :param first: Position of the constraint's values among those of the rollout.
        :param is_fixed: Whether the multiplier stays as it is.
        """
        self.model.eval()
        if len(self._carried) != columns.n_envs:
            self._prepare_hidden_states(columns.n_envs)
        self._carried = columns.carried(self._carried)
        ended = columns.terminated | columns.truncated
        complete = columns.step_complete | ended
        recorded = np.moveaxis(columns.constrained[..., first : first + len(self.sources)], -1, 0) * complete
        n_names = 1 + (self.constraint.per is not None)
        per = (complete if self.sources[0].is_rate else ended).astype(np.float32)
        occurrences = iter(recorded[n_names:])
        counts = [next(occurrences) if source.of_some else per for source in self.sources[:n_names]]
        values, weights, scale = recorded[0], counts[0], 1.0
        if n_names > 1:  # the ratio of two means, whose numbers of episodes may differ
            weights, (n_episodes, n_of_per) = recorded[1], (float(count.sum()) for count in counts)
            scale = n_episodes / n_of_per if n_of_per else 1.0
        if self.sources[0].is_rate:
            total, weight = float(values.sum()), float(weights.sum())
        else:
            total, self._carried[:, 0] = sum_of_ended(values, ended, self._carried[:, 0])
            weight, self._carried[:, 1] = sum_of_ended(weights, ended, self._carried[:, 1])
        if weight * scale:
            self.value = total / (weight * scale)
            if not is_fixed:
                self._control()
        costs = columns.with_rewards((self.sign * (values - self._aim * scale * weights)).astype(np.float32))
        if self._centred is None:
            self._scaling.scale(costs)
        if columns.actor_rewards is not None:
            costs.actor_rewards = costs.rewards
        if self.sources[0].at_end:  # costs of whole episodes are not discounted, and nothing follows a truncated one
            costs.terminated, costs.truncated = ended, np.zeros_like(ended)
        self._add_costs(costs, batch, self._centred or self._returns, self._config.sequence_length)

    def report(self, stats: UpdateStats) -> None:
        """Report value, violation and multiplier, if the value is known."""
        if math.isfinite(self.value):  # an episode has ended
            stats.add_value("constraint_value", self.value, group=self.name)
            stats.add_value("constraint_violation", self.constraint.violation(self.value), group=self.name)
            stats.add_value("constraint_multiplier", self.multiplier, group=self.name)

    def _control(self) -> None:
        """Update the multiplier by the measured value."""
        violation = self.sign * (self.value - self._aim) / self._scale
        self._pid = pid_step(PID(*self._pid), violation, self._config.constraint_gains, self._config.multiplier_limit)
        self._n_at_limit = self._n_at_limit + 1 if self.multiplier >= self._config.multiplier_limit else 0
        if self._n_at_limit == _UPDATES_AT_LIMIT and violation > 0.0:
            logger.warning(
                "algorithm.constraints: %r seems to be infeasible: after %d updates with the largest multiplier, %g, "
                "its value is %.4g. Relax the bound, or raise `algorithm.multiplier_limit`.",
                *(self.constraint.text, _UPDATES_AT_LIMIT, self.multiplier, self.value),
            )

    @override(CostCritic)
    def _parts(self) -> dict[str, Stateful]:
        centred: dict[str, Stateful] = {} if self._centred is None else {"centred": self._centred}
        return {**super()._parts(), "scaling": self._scaling, **centred}


# -- risk --------------------------------------------------------------------------------------------------------------


def running_returns(rewards: np.ndarray, ended: np.ndarray, before: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the return before each tick and after the last one, and those of the episodes that ended.

    :param rewards: `[n_ticks, n_envs]`.
    :param ended: An episode ended with the tick, bool `[n_ticks, n_envs]`.
    :param before: Returns of the running episodes before the first tick, `[n_envs]`.
    :return: `[n_ticks + 1, n_envs]`, and `[n_ended]` in the order of time.
    """
    so_far = np.zeros((len(rewards) + 1, rewards.shape[1]))
    so_far[0] = before
    for tick, reward in enumerate(rewards):
        so_far[tick + 1] = np.where(ended[tick], 0.0, so_far[tick] + reward)
    return so_far, (so_far[:-1] + rewards)[ended]


@dataclass
class TailReturns(ReturnFunction):
    """Advantages of the tail of episode returns, and samples of the return-to-go.

    Returns are not discounted. Nothing follows a truncation, which ends an episode as a termination does.
    """

    level: float
    gae_lambda: float
    generator: torch.Generator
    """Samples the quantile that bootstraps a sample, and the number of rewards before it (`gae_lambda`)."""
    quantile: float = float("nan")
    """NaN: unknown, advantages are those of the mean."""
    so_far: Tensor | None = None
    """Return before each environment step and after the last one, `[n_times + 1, n_envs]`."""
    gamma: float = 1.0

    @override(ReturnFunction)
    def __call__(self, trajectories: Trajectories) -> Returns:
        assert self.so_far is not None
        so_far = self.so_far.to(trajectories.values[0])[..., None]
        ended = trajectories.terminated | trajectories.truncated
        total = sum(trajectories.rewards[1:], trajectories.rewards[0])
        has_own, n_substeps = trajectories.has_own_rewards, len(trajectories.rewards)
        advantages, targets = [], []
        for index, values in enumerate(trajectories.values):
            following = trajectories.next_values[index if has_own else 0]
            reward = trajectories.rewards[index] if has_own else total
            after = so_far[:-1] + reward[..., None]
            of_end = torch.where(ended, self._utility(after), 0.0)
            before, later = self._utility(so_far[:-1] + values), self._utility(after + following)
            ends = (ended, torch.zeros_like(ended))
            advantages.append(gae(of_end, before, later, *ends, 1.0, self.gae_lambda, trajectories.step_complete))
            targets.append(self._samples(following, reward, ended, trajectories.step_complete))
        return Returns(advantages if len(advantages) == n_substeps else advantages * n_substeps, targets)

    def _utility(self, returns: Tensor) -> Tensor:
        """Return the mean contribution of returns `[..., n]` to the objective."""
        is_known = not np.isnan(self.quantile)
        return (tail_values(returns, self.quantile, self.level) if is_known else returns).mean(-1)

    def _samples(self, following: Tensor, reward: Tensor, ended: Tensor, complete: Tensor | None) -> Tensor:
        shape = (*following.shape[:-1], _N_SAMPLES)
        chosen = torch.randint(following.shape[-1], shape, generator=self.generator).to(following.device)
        continues = torch.rand(shape, generator=self.generator).to(following) < self.gae_lambda
        if complete is not None:
            continues |= ~complete[..., None]
        samples = following.gather(-1, chosen)
        for tick in reversed(range(len(samples))):
            if tick + 1 < len(samples):
                samples[tick] = torch.where(continues[tick], samples[tick + 1], samples[tick])
            samples[tick] = reward[tick, :, None] + samples[tick].masked_fill(ended[tick, :, None], 0.0)
        return samples


class LearnedRisk(CostCritic):
    """CVaR as an objective in training: the quantile critic, and the quantile of the latest episode returns.

    The CVaR of the returns `R` is the maximum over `q` of `q + E[min(R - q, 0)] / level`, which the quantile of `level`
    attains (Rockafellar and Uryasev 2000); its gradient is that of the second term with the quantile fixed (Tamar et
    al. 2015, Optimizing the CVaR via sampling). The second term is a reward at the end of an episode, in the state that
    the return so far extends (Bäuerle and Ott 2011). A quantile critic `z_i(s)` of the return-to-go has the
    values of all such states, `V(s, y) = mean_i min(y + z_i(s) - q, 0) / level`, with `y` the return so far.

    :param config: Hyperparameters; `risk` is set.
    :param model: The model that is trained; the quantile critic begins as a copy of its critic with another output.
    :param generator: Source of the samples that the critic learns from.
    """

    saved = ("_so_far", "_episodes")

    def __init__(self, config: ActorCriticConfig, model: TorchActorCritic, generator: torch.Generator) -> None:
        super().__init__(model)
        self.risk, self._config = Risk.parse(config.risk), config
        for key, network in self.critic.networks.items():
            widen(network, config.n_quantiles, f"model.critic.networks[{key!r}]")
        self.critic.n_quantiles = config.n_quantiles
        self._returns = TailReturns(self.risk.level, config.gae_lambda, generator)
        self._n_kept = int(np.ceil(_TAIL_EPISODES / self.risk.level))
        self.restart()

    def restart(self) -> None:
        """Begin anew in other environments."""
        self._so_far = np.zeros(0)
        # Returns of the latest episodes, in the order of their ends.
        self._episodes = np.zeros(0)

    def networks(self) -> Iterator[tuple[tuple[str, Any], nn.Module]]:
        """Return the critic networks, by the event that reports their gradient and by sub-step."""
        is_shared = self.critic.num_critics == 1
        for key, network in self.critic.networks.items():
            yield ("risk_critic_grad_norm", 0 if is_shared else key), network

    def learn(self, columns: RolloutColumns, rewards: np.ndarray, unit: float, batch: RolloutBatch) -> None:
        """Update the quantile by a rollout, and replace the advantages of its batch by those of the objective.

        :param columns: The rollout.
        :param rewards: Rewards of the environment, `[n_ticks, n_envs]`.
        :param unit: The batch was valued with rewards that were divided by it.
        :param batch: The rollout with returns; targets of the quantile critic are added.
        :raises ConfigError: The critic predicts the rewards of actors that come and go.
        """
        come_and_go = columns.actor_rewards is not None and not columns.is_dense()
        if come_and_go and self.critic.predicts_substeps:
            raise ConfigError(
                "algorithm.risk: expected a shared critic where actors with rewards of their own come and go, because "
                "risk concerns the return of the episode; found a step critic. Use model=auto with "
                "critic=flatten_concat_shared."
            )
        if len(self._so_far) != columns.n_envs:
            self._prepare_hidden_states(columns.n_envs)
        self._so_far = columns.carried(self._so_far)
        so_far, ended = running_returns(rewards, columns.terminated | columns.truncated, self._so_far)
        self._so_far = so_far[-1]
        self._episodes = np.concatenate([self._episodes, ended])[-self._n_kept :]
        n_ticks_per_time = len(columns.actor_sequence) if columns.actor_sequence is not None else 1
        self._returns.so_far = torch.from_numpy(so_far[::n_ticks_per_time] / unit).float()
        self._returns.quantile = self.quantile / unit
        scaled = columns.with_rewards((rewards / unit).astype(np.float32))
        self.model.eval()
        self._add_costs(scaled, batch, self._returns, self._config.sequence_length)
        weight = self.risk.mean_weight
        for part in batch.parts:
            pairs = zip(part.advantages, part.costs[-1].advantages, strict=True)
            part.advantages = [weight * of_mean + (1.0 - weight) * of_tail for of_mean, of_tail in pairs]

    @property
    def quantile(self) -> float:
        """Quantile of the latest episode returns; NaN: there are too few of them."""
        if len(self._episodes) * self.risk.level < 1.0:
            return float("nan")
        return float(np.quantile(self._episodes, self.risk.level))

    def loss(self, value: Tensor, target: Tensor) -> Tensor:
        """Return the loss of the quantile critic, `[]`.

        :param value: Quantiles `[n_rows, n_quantiles]`.
        :param target: Samples `[n_rows, n_samples]`.
        """
        return quantile_huber_loss(value, target, _KAPPA).mean()

    def report(self, stats: UpdateStats) -> None:
        """Report quantile and CVaR of the latest episode returns, if they are known."""
        if not np.isnan(quantile := self.quantile):
            stats.add_value("risk_quantile", quantile)
            tail = tail_values(self._episodes, quantile, self.risk.level)
            stats.add_value("risk_cvar", quantile + float(tail.mean()))
