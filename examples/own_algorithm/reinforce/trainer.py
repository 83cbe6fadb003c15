"""REINFORCE with a baseline."""

from abc import ABC
from typing import Any

import numpy as np
import torch

from maze.core.agent.flat_adam import FlatAdam
from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.trainers.common.actor_critic.valuation import GAE, value_rollout
from maze.train.trainers.common.learning import Losses, gradient_step
from maze.train.trainers.common.trainer import EpochTrainer
from maze.train.trainers.common.training_runner import TrainingRunner
from reinforce.config import ReinforceConfig


class ReinforceEvents(ABC):
    """Statistics, reported per epoch as means over its updates."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def policy_loss(self, step_key: int | str, value: float) -> None:
        """Loss of the policy of a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def policy_entropy(self, step_key: int | str, value: float) -> None:
        """Entropy of the actions of a sub-step."""

    @define_epoch_stats(np.mean)
    def baseline_loss(self, value: float) -> None:
        """Mean squared error of the baseline."""


class Reinforce(EpochTrainer):
    """REINFORCE (Williams 1992) with a learned baseline: weights log-probabilities by the return minus the critic's
    value. Episodes that continue after the rollout are bootstrapped."""

    config_class = ReinforceConfig
    events_class = ReinforceEvents
    config: ReinforceConfig

    def __init__(self, config: Any, model: TorchActorCritic, rollouts: RolloutGenerator, **common: Any) -> None:
        super().__init__(config, model, **common)
        self.rollouts = rollouts
        networks = {"policy": model.policy, "baseline": model.critic}
        named = {(name, key): net for name, part in networks.items() for key, net in part.networks.items()}
        self.optimizer = FlatAdam(named, lr=self.config.lr, eps=1e-8)

    @classmethod
    def build(cls, run: TrainingRunner) -> "Reinforce":
        model = run.model()
        return cls(run.algorithm, model, run.rollouts(), **run.common_arguments(model))

    def _update(self) -> None:
        columns = self.rollouts.allocate(self.config.n_rollout_steps, self.model.policy)
        self.rollouts.collect(self.model.policy, columns)
        losses = self._losses(value_rollout(self.model, columns, GAE(self.config.gamma, gae_lambda=1.0)))
        gradient_step(losses, self.optimizer, self.config.max_grad_norm)
        self.stats.add(losses)

    def _losses(self, batch: Any) -> Losses:
        losses = Losses(torch.zeros((), device=self.model.device))
        for part in batch.parts:
            policy, critic = part.evaluate(self.model)
            for substep, output, advantage in zip(part.substeps, policy.substep_outputs, part.advantages, strict=True):
                log_prob = output.prob_dist.joint_log_prob(substep.action)
                loss = -(log_prob * advantage).mean()  # advantage: return minus baseline
                losses.report("policy_loss", loss, substep.actor_id.step_key, weight=1.0)
                entropy = output.entropy.mean()
                losses.report("policy_entropy", entropy, substep.actor_id.step_key, weight=-self.config.entropy_coef)
            for value, target in zip(critic.values, part.targets, strict=True):
                losses.report("baseline_loss", (value - target).square().mean(), weight=1.0)
        return losses

    def steps_per_update(self) -> int:
        return self.config.n_rollout_steps * self.rollouts.env.n_envs

    def episode_source(self) -> Any:
        return self.rollouts.env

    def _parts(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "rollouts": self.rollouts}
