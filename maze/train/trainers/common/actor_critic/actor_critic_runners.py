"""Runners of A2C and PPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import whole_number
from maze.train.trainers.common.config_classes import AlgorithmConfig
from maze.train.trainers.common.trainer import Trainer
from maze.train.trainers.common.training_runner import TrainingRunner


@dataclass
class ACRunner(TrainingRunner):
    """Train actor and critic on rollouts.

    :param trainer_class: The trainer, such as `maze.train.trainers.ppo.ppo_trainer.PPO`.
    :param concurrency: See :class:`TrainingRunner`, as for the others.
    :param eval_repeats: Number of episodes per evaluation; `None`: `algorithm.rollout_evaluator.n_episodes`.
    :param critic_burn_in_epochs: Number of epochs at the start in which the critic learns alone; `None`:
        `algorithm.critic_burn_in_epochs`.
    """

    trainer_class: str | type[Trainer] = ""
    concurrency: int = 0
    eval_concurrency: int = 0
    eval_repeats: int | None = None
    critic_burn_in_epochs: int | None = None

    trains: ClassVar[str] = "maze.train.trainers.common.actor_critic.actor_critic_trainer.ActorCritic"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, minimum in (("eval_repeats", 1), ("critic_burn_in_epochs", 0)):
            if getattr(self, name) is not None:
                whole_number(f"runner.{name}", getattr(self, name), minimum)

    @override(TrainingRunner)
    def _checked_algorithm(self, algorithm: Any) -> AlgorithmConfig | None:
        """Return the algorithm's configuration, in which the runner's own values take precedence."""
        config: Any = super()._checked_algorithm(algorithm)
        if config is None:
            raise ConfigError("runner.trainer_class: expected the path of a trainer, such as `...ppo_trainer.PPO`.")
        if self.critic_burn_in_epochs is not None:
            config = replace(config, critic_burn_in_epochs=self.critic_burn_in_epochs)
        if self.eval_repeats is not None:
            evaluator = getattr(config, "rollout_evaluator", None)
            if not isinstance(evaluator, Mapping):
                raise ConfigError(
                    "runner.eval_repeats: expected a configured evaluator, found none. Configure "
                    "`algorithm.rollout_evaluator`, or leave `runner.eval_repeats` empty."
                )
            config = replace(config, rollout_evaluator={**evaluator, "n_episodes": self.eval_repeats})
        return config  # type: ignore[no-any-return]


@dataclass
class ACDevRunner(ACRunner):
    """Step all environments in the training process: the fastest choice for cheap environments."""


@dataclass
class ACLocalRunner(ACRunner):
    """Step the environments in worker processes: worth it where a step costs far more than sending an action."""

    default_placement: ClassVar[str] = "processes"
