"""Advantage actor-critic."""

from __future__ import annotations

from typing import ClassVar

from maze.train.trainers.a2c.a2c_algorithm_config import A2CAlgorithmConfig
from maze.train.trainers.common.actor_critic.actor_critic_trainer import ActorCritic
from maze.train.trainers.common.config_classes import ActorCriticConfig


class A2C(ActorCritic):
    """Synchronous advantage actor-critic (Mnih et al. 2016): one gradient step for each rollout."""

    config_class: ClassVar[type[ActorCriticConfig]] = A2CAlgorithmConfig
