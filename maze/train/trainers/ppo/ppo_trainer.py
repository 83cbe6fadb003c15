"""Proximal policy optimization."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from maze.core.annotations import override
from maze.train.trainers.common.actor_critic.actor_critic_trainer import ActorCritic, SurrogateLoss, clipped_surrogate
from maze.train.trainers.common.actor_critic.valuation import RolloutBatch
from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.ppo.ppo_algorithm_config import PPOAlgorithmConfig


class PPO(ActorCritic):
    """Proximal policy optimization with a clipped objective (Schulman et al. 2017)."""

    config_class: ClassVar[type[ActorCriticConfig]] = PPOAlgorithmConfig
    learns_at_once: ClassVar[bool] = False
    config: PPOAlgorithmConfig

    @override(ActorCritic)
    def _optimize(self, batch: RolloutBatch) -> None:
        for _ in range(self.config.n_optimization_epochs):
            for minibatch in batch.shuffled(self.config.batch_size, self.generator):
                losses = self._losses(minibatch)
                if self.config.target_kl is not None:
                    divergences = [value for event, _, value in losses.terms if event == "policy_approx_kl"]
                    if torch.stack(divergences).max() > 1.5 * self.config.target_kl:
                        return  # the policy has left the neighbourhood in which the rollout is valid for it
                self._gradient_step(losses)

    @override(ActorCritic)
    def _policy_loss(self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> SurrogateLoss:
        return clipped_surrogate(log_prob, old_log_prob, advantage, self.config.clip_range)
