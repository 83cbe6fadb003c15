"""Hyperparameters of the algorithms that learn from logged decisions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maze.core.utils.config_utils import Amount, Count, Positive, Share
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator
from maze.train.trainers.dqn.dqn_algorithm_config import DQNAlgorithmConfig
from maze.train.trainers.sac.sac_algorithm_config import SACAlgorithmConfig


@dataclass(kw_only=True)
class OfflineConfig(AlgorithmConfig):
    """Hyperparameters of all algorithms that learn from logged decisions."""

    n_epochs: int = 10
    """Number of epochs; 0: until early stopping, 1,000 at most."""

    epoch_length: int = 1000
    """Number of updates per epoch. Each epoch ends with an evaluation."""

    patience: int = 0
    """Number of epochs without a better evaluation after which training stops; 0 never stops early."""

    device: str = "cpu"
    """Device of the networks: `cpu`, `cuda`, or `cuda:<index>`."""

    lr: Positive = 3e-4
    """Learning rate of Adam."""

    gamma: Share = 0.99
    """Discount per environment step."""

    batch_size: Count = 256
    """Number of decisions in the batch of each policy network."""

    tau: Share = 0.005
    """Step size of the target networks; 1 copies the weights."""

    rollout_evaluator: Any = field(default_factory=default_rollout_evaluator)
    """Evaluates the policy in the environment between epochs (or its configuration); `None`: no evaluation, the weights
    of the last epoch are kept."""


@dataclass(kw_only=True)
class IQLConfig(OfflineConfig):
    """Hyperparameters of :class:`~maze.train.trainers.offline.offline_trainers.IQL`."""

    critic = "state-action"
    trainer = "maze.train.trainers.offline.offline_trainers.IQL"
    distributions = SACAlgorithmConfig.distributions

    expectile: Share = 0.7
    """Expectile of the action values that the state value estimates: 0.5 is their mean, towards 1 their maximum."""

    inverse_temperature: Amount = 3.0
    """Factor of the advantage in the weights of the policy's regression; 0 clones the logged behaviour."""

    max_weight: Positive = 100.0
    """Largest weight of an action in the policy's regression."""


@dataclass(kw_only=True)
class CQLConfig(OfflineConfig):
    """Hyperparameters of :class:`~maze.train.trainers.offline.offline_trainers.CQL`."""

    trainer = "maze.train.trainers.offline.offline_trainers.CQL"
    distributions = DQNAlgorithmConfig.distributions

    alpha: Amount = 1.0
    """Weight of the conservative term; 0 is double DQN."""

    target_update_interval: Count = 1
    """Number of updates between two steps of the target networks."""


@dataclass(kw_only=True)
class TD3BCConfig(OfflineConfig):
    """Hyperparameters of :class:`~maze.train.trainers.offline.offline_trainers.TD3BC`."""

    name = "td3_bc"
    critic = "state-action"
    trainer = "maze.train.trainers.offline.offline_trainers.TD3BC"
    distributions = SACAlgorithmConfig.distributions

    alpha: Amount = 2.5
    """Weight of the action value relative to the distance from the logged action."""

    policy_delay: Count = 2
    """Number of updates of the critic for each update of the policy and of the target networks."""

    target_noise: Amount = 0.2
    """Standard deviation of the noise of target actions, which are in [-1, 1]."""

    target_noise_clip: Amount = 0.5
    """Largest noise of target actions."""
