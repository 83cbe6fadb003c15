"""Hyperparameters of PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maze.core.utils.config_utils import Amount, Count, Natural, Positive, Share
from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.common.evaluators.evaluator import Evaluator, default_rollout_evaluator


@dataclass
class PPOAlgorithmConfig(ActorCriticConfig):
    """Hyperparameters of :class:`~maze.train.trainers.ppo.ppo_trainer.PPO`."""

    trainer = "maze.train.trainers.ppo.ppo_trainer.PPO"

    lr: Amount = 0.00025
    """Learning rate of the Adam optimizer at the start of the run."""

    batch_size: Count = 100
    """Number of environment steps in a minibatch."""

    n_optimization_epochs: Count = 4
    """Number of passes over each rollout."""

    clip_range: float = 0.2
    """Distance of the policy ratio from 1 from which the objective is clipped. Typical: 0.1 to 0.3."""

    rollout_evaluator: Evaluator | Mapping[str, Any] = field(default_factory=default_rollout_evaluator)
    """Evaluates the policy after each epoch, for the selection of the best model and for early stopping."""

    value_clip_range: Positive | None = field(default=None, kw_only=True)
    """Change of a predicted value in an update from which its loss is clipped; `null`: no limit."""

    target_kl: Positive | None = field(default=None, kw_only=True)
    """A rollout is not used any further when the policy has moved farther than 1.5 times this KL divergence from the
    one that sampled it; `null` uses it to the end. Typical: 0.01 to 0.05."""

    sequence_length: Natural = field(default=0, kw_only=True)
    """Most steps that gradients flow back through in a model with carried hidden states (truncated back-propagation
    through time); minibatches consist of whole sequences. 0: to where the episode or the rollout begins."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("clip_range", 0.0, 1.0, above=True, below=True)


@dataclass
class PPOAutoAlgorithmConfig(PPOAlgorithmConfig):
    """Hyperparameters of PPO for a new problem: small minibatches, GAE, a limit of the gradient, scaled rewards.

    Apart from the scaled rewards, the values are the defaults of stable-baselines3 for a rollout of 2,048 steps, with
    eight environments. With `model=auto`, layers are initialised as there as well (orthogonal).
    """

    name = "ppo_auto"

    lr: Amount = 0.0003
    gamma: Share = 0.99
    gae_lambda: Share = 0.95
    n_rollout_steps: Count = 256
    batch_size: Count = 64
    n_optimization_epochs: Count = 10
    entropy_coef: Amount = 0.0
    max_grad_norm: Amount = 0.5
    reward_scaling: bool = field(default=True, kw_only=True)
