"""Runners of A2C and PPO, and the curriculum of a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from omegaconf import OmegaConf

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import CheckedConfig, Count, EnvFactory, whole_number
from maze.core.wrappers.observation_normalization.observation_normalization_utils import make_normalized_env_factory
from maze.perception.models.space_config import SpacesConfig
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
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


# -- curriculum -------------------------------------------------------------------------------------------------------


@dataclass
class Stage(CheckedConfig):
    """A number of epochs with environment arguments that differ from `env`."""

    section = "curriculum"

    n_epochs: Count = 1
    """Number of epochs."""

    env: Mapping[str, Any] = field(default_factory=dict)
    """Environment arguments that differ, with the keys of `env`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.env, Mapping):
            raise ConfigError(f"curriculum.env: expected arguments of the environment by name, found {self.env!r}.")


class Curriculum:
    """Stages of a run, followed by its environment as configured. The stage changes between epochs.

    Each stage has its own vector environment, made by the execution backend. The stage depends on the number of the
    epoch only, and the seeds of all stages are drawn in advance.

    :param run: The runner.
    :param stages: The stages in their order.
    """

    def __init__(self, run: TrainingRunner, stages: list[Stage]) -> None:
        self._run = run
        self._stages = stages
        self._env: StructuredVectorEnv | None = None
        self.stage = -1
        """Index of the current stage; the index after the last stage stands for the environment as configured."""
        n_envs = run.n_training_envs
        self._seeds = [run.env_seeds(n_envs) for _ in range(len(stages) + 1)]

    @classmethod
    def of(cls, run: TrainingRunner) -> Curriculum | None:
        """Return the configured curriculum of a run; `None`: there is none.

        :param run: The runner.
        :raises ConfigError: The configuration is not a list of stages.
        """
        config = run.cfg.get("curriculum")
        if not config:
            return None
        stages = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config
        if not isinstance(stages, list):
            raise ConfigError(f"curriculum: expected a list of stages with `n_epochs` and `env`, found {stages!r}.")
        return cls(run, [Stage.from_config(stage) for stage in stages])

    def entered(self, epoch: int) -> RolloutGenerator | None:
        """Enter the stage of an epoch: close the old environments and return a rollout generator for the new ones.

        :param epoch: Index of the epoch.
        :return: `None`: the stage did not change.
        :raises ConfigError: The model cannot act in the environments of the stage.
        """
        run = self._run
        stage = sum(end <= epoch for end in itertools.accumulate(each.n_epochs for each in self._stages))
        if stage == self.stage:
            return None
        self.stage = stage
        factory = run.env_factory if stage == len(self._stages) else self._env_factory(stage)
        before = self._env
        if before is not None:
            run.give_back(before)
        rollouts = run.rollouts(factory, self._seeds[stage])
        self._env = rollouts.env
        if before is not None:
            rollouts.env.epoch_stats = before.epoch_stats  # cumulative statistics continue
        return rollouts

    def _env_factory(self, stage: int) -> Callable[[], Any]:
        run, arguments = self._run, self._stages[stage].env
        config = OmegaConf.merge(run.cfg.env, arguments)
        plain = EnvFactory(config, run.cfg.get("wrappers") or {}, run.env_timeout)
        factory = make_normalized_env_factory(plain, run.normalization_statistics)
        env = factory()
        try:
            spaces = SpacesConfig(env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict)
        finally:
            env.close()
        if differences := run.spaces.differences(spaces):
            raise ConfigError(
                f"curriculum[{stage}].env: the model cannot act in these environments. {'; '.join(differences)}. Only "
                "numbers of candidates may differ from `env`; the environment has to pad all other observations to the "
                "same size."
            )
        return factory
