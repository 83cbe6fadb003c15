"""Hyperparameters of IMPALA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from maze.core.errors import ConfigError
from maze.core.utils.config_utils import Amount, Count, Positive, Share
from maze.train.trainers.common.config_classes import ActorCriticConfig
from maze.train.trainers.common.evaluators.evaluator import Evaluator, default_rollout_evaluator


@dataclass
class ImpalaAlgorithmConfig(ActorCriticConfig):
    """Hyperparameters of :class:`~maze.train.trainers.impala.impala_trainer.IMPALA`."""

    trainer = "maze.train.trainers.impala.impala_trainer.IMPALA"

    n_rollout_steps: Count = 100
    """Number of environment steps of a rollout; actors update their policy between two rollouts."""

    entropy_coef: Amount = 0.01
    """Weight of the entropy bonus that keeps the policy exploring."""

    device: str = "cpu"
    """Device of the learner: `cpu`, `cuda`, or `cuda:<index>`. Actors always use the CPU."""

    queue_out_of_sync_factor: Amount = 1.0
    """Maximum number of finished rollouts that wait for the learner, in units of `actors_batch_size`. The maximum age
    of a rollout in policy updates is `queue_out_of_sync_factor + num_actors / actors_batch_size` (rounded up)."""

    actors_batch_size: Count = 8
    """Number of rollouts of an update."""

    num_actors: Count = 8
    """Number of actors; with the `local` runner each is a process."""

    vtrace_clip_rho_threshold: Positive | None = 1.0
    """Limit of the importance weights of the value targets (rho bar in the paper); `null`: unlimited."""

    vtrace_clip_pg_rho_threshold: Positive | None = 1.0
    """Limit of the importance weights of the policy gradient; `null`: unlimited."""

    rollout_evaluator: Evaluator | Mapping[str, Any] = field(default_factory=default_rollout_evaluator)
    """Evaluates the policy after each epoch, for the selection of the best model and for early stopping."""

    gae_lambda: Share = field(default=1.0, kw_only=True)
    """Decay of the traces of V-trace (its lambda): 1 is the estimator of the paper, smaller values reduce variance."""

    advantage_normalization: bool = field(default=False, kw_only=True)
    """Whether to normalize the advantages of each batch to mean 0 and standard deviation 1."""

    envs_per_actor: Count = field(default=1, kw_only=True)
    """Number of environments that an actor steps together with one forward pass, which is faster for cheap
    environments. The number of steps of a rollout is multiplied by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in (("constraints", self.constraints), ("risk", self.risk)):
            if value:
                raise ConfigError(f"algorithm.{name}: expected none with IMPALA, use PPO or A2C.")
