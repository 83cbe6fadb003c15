"""Hyperparameters of behavioural cloning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from maze.core.utils.config_utils import Amount, Count, Natural
from maze.train.trainers.common.config_classes import AlgorithmConfig


def default_optimizer() -> dict[str, Any]:
    """Return the configuration of the optimizer."""
    return {"_target_": "torch.optim.Adam", "lr": 0.001}


@dataclass
class BCAlgorithmConfig(AlgorithmConfig):
    """Hyperparameters of :class:`~maze.train.trainers.imitation.bc_trainer.BCTrainer`."""

    trainer = "maze.train.trainers.imitation.bc_trainer.BCTrainer"

    n_epochs: int = 1000
    """Number of passes over the training data; 0: until an interrupt."""

    device: str = "cuda"
    """Device of the networks: `cpu`, `cuda`, or `cuda:<index>`; without a GPU, the default means `cpu`."""

    batch_size: Count = 100
    """Number of environment steps in a minibatch."""

    n_eval_workers: Natural = 0
    """Number of environments for evaluation rollouts; 0: the runner's `eval_concurrency`."""

    validation_percentage: float = 20
    """Share of the data, in percent, that is kept for validation."""

    eval_every_k_iterations: Count | None = 500
    """Evaluates after every so many minibatches, besides the end of each epoch; `null`: only there."""

    n_eval_episodes: Natural = 8
    """Number of episodes per evaluation; 0: the policy is evaluated on validation data only."""

    max_episode_steps: Natural = 0
    """Evaluation episodes are truncated after this number of steps; 0: never."""

    optimizer: Any = field(default_factory=default_optimizer)
    """Configuration of the optimizer; it gets the parameters as `params`."""

    entropy_coef: Amount = 0.0
    """Weight of the entropy bonus."""

    validation_split: str = field(default="auto", kw_only=True)
    """Validation data: whole `episodes`, which measures the performance in new episodes; single `steps`, which leaves
    steps of every episode for training; `auto`: episodes where there are at least ten of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_number("validation_percentage", 0.0, 100.0, below=True)
        self.require_choice("validation_split", ("auto", "episodes", "steps"))
