"""Hyperparameters of A2C."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.common.evaluators.evaluator import Evaluator, default_rollout_evaluator


@dataclass
class A2CAlgorithmConfig(ActorCriticConfig):
    """Hyperparameters of :class:`~maze.train.trainers.a2c.a2c_trainer.A2C`."""

    trainer = "maze.train.trainers.a2c.a2c_trainer.A2C"

    rollout_evaluator: Evaluator | Mapping[str, Any] = field(default_factory=default_rollout_evaluator)
    """Evaluates the policy after each epoch, for the selection of the best model and for early stopping."""
