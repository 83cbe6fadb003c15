"""CVaR of episode returns as an objective: a quantile critic, and advantages of the tail.

The CVaR of the returns `R` is the maximum over `q` of `q + E[min(R - q, 0)] / level`, which the quantile of `level`
attains (Rockafellar and Uryasev 2000); its gradient is that of the second term with the quantile fixed (Tamar et al.
2015, Optimizing the CVaR via sampling). The second term is a reward at the end of an episode, in the state
that the return so far extends (Bäuerle and Ott 2011). A quantile critic `z_i(s)` of the rest of the return has the
values of all such states, `V(s, y) = mean_i min(y + z_i(s) - q, 0) / level`, with `y` the return so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from maze.core.agent.returns import ReturnFunction, Returns, Trajectories, gae
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.stats_utils import tail_values
from maze.train.trainers.common.actor_critic.constraints import CostCritic
from maze.train.trainers.common.actor_critic.valuation import RolloutBatch
from maze.train.trainers.common.config_classes import Risk
from maze.train.trainers.common.learning import quantile_huber_loss, widen

if TYPE_CHECKING:
    from maze.core.agent.torch_actor_critic import TorchActorCritic
    from maze.core.rollout.rollout_columns import RolloutColumns
    from maze.train.trainers.common.config_classes import ActorCriticConfig
    from maze.train.trainers.common.learning import UpdateStats

# Half-width of the quadratic part of the loss, in units of the rewards that are learned from.
_KAPPA = 0.1
# Number of samples of the rest of the return that quantiles are learned from, at each decision.
_N_SAMPLES = 10
# The quantile is estimated from so many episodes in the tail, the latest ones.
_TAIL_EPISODES = 20


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
    """Advantages of the tail of episode returns, and samples of the rest of the return.

    Returns are not discounted. Nothing follows a truncation, which ends an episode as a termination does.
    """

    level: float
    gae_lambda: float
    generator: torch.Generator
    """Chooses the quantile that stands for the rest in a sample, and how many rewards come before it (`gae_lambda`)."""
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
    """Risk as an objective in training: the quantile critic, and the quantile of the latest episode returns.

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
                "risk concerns the return of the episode; found a step critic. Use `critic=flatten_concat_shared`."
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
