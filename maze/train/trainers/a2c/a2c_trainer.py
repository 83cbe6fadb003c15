"""Advantage actor-critic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from maze.core.annotations import override
from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.actor_critic.actor_critic_config import ActorCriticConfig
from maze.train.trainers.common.actor_critic.actor_critic_trainer import ActorCritic
from maze.train.trainers.common.actor_critic.losses import policy_gradient_loss
from maze.train.trainers.common.actor_critic.rollout_batch import RolloutBatch


class A2C(ActorCritic):
    """Synchronous advantage actor-critic (Mnih et al. 2016): one gradient step for each rollout."""

    config_class: ClassVar[type[ActorCriticConfig]] = A2CAlgorithmConfig

    @override(ActorCritic)
    def _optimize(self, batch: RolloutBatch) -> None:
        self._gradient_step(self._losses(batch))

    @override(ActorCritic)
    def _policy_loss(
        self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return policy_gradient_loss(log_prob, advantage), {}
