"""Hyperparameters of REINFORCE."""

from dataclasses import dataclass, field
from typing import Any

from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.evaluators.evaluator import default_rollout_evaluator


@dataclass
class ReinforceConfig(AlgorithmConfig):
    """Hyperparameters of :class:`~reinforce.trainer.Reinforce`."""

    critic = "state"
    trainer = "reinforce.trainer.Reinforce"

    epoch_length: int = 10
    """Number of updates per epoch."""

    n_rollout_steps: int = 256
    """Number of steps taken in each environment for an update."""

    lr: float = 0.003
    """Learning rate of Adam."""

    gamma: float = 0.99
    """Discount per environment step."""

    entropy_coef: float = 0.01
    """Weight of the entropy bonus that keeps the policy exploring."""

    max_grad_norm: float = 0.5
    """Gradients are scaled down to this norm where they are larger; 0 leaves them alone."""

    rollout_evaluator: Any = field(default_factory=default_rollout_evaluator)
    """Evaluator between epochs (or its configuration); `None`: training episodes select the best model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("epoch_length", "n_rollout_steps"):
            self.require_integer(name, minimum=1)
        self.require_number("lr", 0.0, above=True)
        self.require_number("gamma", 0.0, 1.0)
        for name in ("entropy_coef", "max_grad_norm"):
            self.require_number(name, 0.0)
