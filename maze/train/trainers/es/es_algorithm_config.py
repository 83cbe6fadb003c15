"""Hyperparameters of evolution strategies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from maze.core.errors import ConfigError
from maze.core.utils.config_utils import Amount, Natural, Positive
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.model_selection.model_selection_base import SelectionCriterion


def default_optimizer() -> dict[str, Any]:
    """Return the default configuration of the optimizer."""
    return {"_target_": "maze.train.trainers.es.optimizers.adam.Adam", "step_size": 0.01}


@dataclass
class ESAlgorithmConfig(AlgorithmConfig):
    """Hyperparameters of :class:`~maze.train.trainers.es.es_trainer.ESTrainer`. An epoch is one update."""

    trainer = "maze.train.trainers.es.es_trainer.ESTrainer"

    n_rollouts_per_update: Natural = 10
    """Minimum number of episodes per update; they come in mirrored pairs, so an odd number is rounded up."""

    n_timesteps_per_update: Natural = 0
    """Minimum number of environment steps per update; an update reaches both minimums."""

    max_steps: Natural = 0
    """Episodes are truncated after this number of environment steps; 0: never."""

    optimizer: Any = field(default_factory=default_optimizer)
    """Optimizer of the estimated gradient, as an object or its configuration."""

    l2_penalty: Amount = 0.005
    """Weight of the penalty on the squared norm of the parameters."""

    noise_stddev: Positive = 0.02
    """Standard deviation of the perturbations of the parameters."""

    policy_wrapper: Any = None
    """Configuration of a policy that wraps the trained policy (its argument `torch_policy`); `null`: none."""

    patience: int = field(default=0, kw_only=True)
    """Number of evaluations without improvement after which training stops; 0: no early stopping."""

    objective: str | None = field(default=None, kw_only=True)
    """Statistic or KPI of the evaluation that selects the best model, such as `kpi/waste`; `null`: the mean return.
    The gradient always follows the returns."""

    maximize: bool = field(default=True, kw_only=True)
    """Whether larger values of the objective are better."""

    constraints: Sequence[str] = field(default_factory=list, kw_only=True)
    """Constraints on the statistics of the best model, such as `invalid_cut <= 0`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        SelectionCriterion(self.objective, self.maximize, self.constraints)
        if self.n_rollouts_per_update == 0 and self.n_timesteps_per_update == 0:
            raise ConfigError(
                "algorithm: `n_rollouts_per_update` and `n_timesteps_per_update` are both 0; an update would have no "
                "episodes; set one of them."
            )
