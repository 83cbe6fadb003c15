"""Runners of actor-critic trainings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import Factory
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.actor_critic.actor_critic_config import ActorCriticConfig
from maze.train.trainers.common.actor_critic.actor_critic_trainer import ActorCritic
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.resumption import CHECKPOINT_FILE
from maze.train.trainers.common.training_runner import TrainingRunner, default_concurrency

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass
class ACRunner(TrainingRunner, ABC):
    """Builds model, environments, evaluator and trainer, and trains.

    :param trainer_class: The trainer, such as ``maze.train.trainers.ppo.ppo_trainer.PPO``.
    :param concurrency: Number of training environments; 0: one for each CPU core, but at least eight.
    :param eval_concurrency: Number of evaluation environments; 0: as many as episodes and CPU cores suggest.
    :param eval_repeats: Number of episodes per evaluation; ``None``: ``algorithm.rollout_evaluator.n_episodes``.
    :param critic_burn_in_epochs: Number of epochs at the start in which the critic learns alone; ``None``:
        ``algorithm.critic_burn_in_epochs``.
    """

    trainer_class: str | type[ActorCritic] = ""
    concurrency: int = 0
    eval_concurrency: int = 0
    eval_repeats: int | None = None
    critic_burn_in_epochs: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("concurrency", "eval_concurrency", "eval_repeats", "critic_burn_in_epochs"):
            value, minimum = getattr(self, name), 1 if name == "eval_repeats" else 0
            if value is None and name in ("eval_repeats", "critic_burn_in_epochs"):
                continue
            whole_number(f"runner.{name}", value, minimum)

    @override(TrainingRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        assert self.env_factory is not None
        trainer_class = self._trainer_type()
        config = self._algorithm_config(trainer_class, cfg.algorithm)
        model = self._build_actor_critic(trainer_class.__name__, config.device)
        model_selection = BestModelSelection(
            dump_file=self.state_dict_dump_file, model=model, dump_interval=self.dump_interval
        )
        try:
            train_env = self._training_env(self.concurrency or default_concurrency())
            evaluator = self._build_evaluator(getattr(config, "rollout_evaluator", None), model_selection)
            self._trainer = trainer_class(
                algorithm_config=config,
                rollout_generator=RolloutGenerator(train_env),
                evaluator=evaluator,
                model=model,
                model_selection=model_selection,
                seed=self.maze_seeding.generate_agent_instance_seed(),
                checkpoint_file=CHECKPOINT_FILE,
            )
            self._init_trainer_from_input_dir(self._trainer, self.state_dict_dump_file, cfg.get("input_dir"))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Builds a vector environment.

        :param env_factory: Makes one environment.
        :param concurrency: Number of environments.
        :param logging_prefix: Where their statistics are logged.
        """

    def _algorithm_config(self, trainer_class: type[ActorCritic], algorithm: Any) -> ActorCriticConfig:
        """The algorithm's configuration, in which the runner's own values take precedence."""
        config = trainer_class.config_class.from_config(algorithm)
        if self.critic_burn_in_epochs is not None:
            config = replace(config, critic_burn_in_epochs=self.critic_burn_in_epochs)
        return config

    def _trainer_type(self) -> type[ActorCritic]:
        if not self.trainer_class:
            raise ConfigError("runner.trainer_class: expected the path of a trainer, such as `...ppo_trainer.PPO`.")
        return Factory(ActorCritic).type_from_name(self.trainer_class)

    def _build_evaluator(self, config: Any, model_selection: BestModelSelection) -> Evaluator | None:
        if self.eval_repeats is not None:
            if not isinstance(config, Mapping):
                raise ConfigError(
                    "runner.eval_repeats: there is no evaluator configured that could play so many episodes; configure "
                    "`algorithm.rollout_evaluator`, or leave `runner.eval_repeats` empty."
                )
            config = {**config, "n_episodes": self.eval_repeats}
        return self._rollout_evaluator(config, model_selection, self.create_distributed_env, self.eval_concurrency)

    def _training_env(self, concurrency: int) -> StructuredVectorEnv:
        assert self.env_factory is not None
        env = self.create_distributed_env(self.env_factory, concurrency, "train")
        self._closing.append(env.close)
        env.seed(self._env_seeds(concurrency))
        return env


@dataclass
class ACDevRunner(ACRunner):
    """Steps all environments in the process of the training: the fastest choice for cheap environments."""

    @override(ACRunner)
    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> SequentialVectorEnv:
        return SequentialVectorEnv([env_factory] * concurrency, logging_prefix=logging_prefix)


@dataclass
class ACLocalRunner(ACRunner):
    """Steps the environments in worker processes: worth it where a step costs far more than sending an action."""

    @override(ACRunner)
    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> SubprocVectorEnv:
        return SubprocVectorEnv([env_factory] * concurrency, logging_prefix=logging_prefix)
