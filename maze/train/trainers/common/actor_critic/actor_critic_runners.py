"""Runners of actor-critic trainings."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maze.core.agent.torch_actor_critic import TorchActorCritic
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.factory import Factory
from maze.core.wrappers.running_statistics import FrozenEnvFactory
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.actor_critic.actor_critic_trainer import ActorCritic
from maze.train.trainers.common.evaluators.evaluator import Evaluator
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.training_runner import TrainingRunner

if TYPE_CHECKING:
    from omegaconf import DictConfig

MIN_CONCURRENCY = 8
"""Number of training environments where neither the user nor the number of CPU cores asks for more."""

CHECKPOINT_FILE = "latest.pt"


@dataclass
class ACRunner(TrainingRunner, ABC):
    """Builds model, environments, evaluator and trainer, and trains.

    :param trainer_class: The trainer, such as ``maze.train.trainers.ppo.ppo_trainer.PPO``.
    :param concurrency: Number of training environments; 0: one for each CPU core, but at least eight.
    :param eval_concurrency: Number of evaluation environments; 0: as many as episodes and CPU cores suggest.
    """

    trainer_class: str | type[ActorCritic] = ""
    concurrency: int = 0
    eval_concurrency: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._envs: list[StructuredVectorEnv] = []
        for name in ("concurrency", "eval_concurrency"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"runner.{name}: expected an integer of at least 0, got {value!r}.")

    @override(TrainingRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        assert self.env_factory is not None
        trainer_class = self._trainer_type()
        config = trainer_class.config_class.from_config(cfg.algorithm)
        model = self._build_model(config.device)
        model_selection = BestModelSelection(
            dump_file=self.state_dict_dump_file, model=model, dump_interval=self.dump_interval
        )
        try:
            train_env = self._vector_env(self.concurrency or _default_concurrency(), "train")
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

    @override(TrainingRunner)
    def run(self, n_epochs: int | None = None, **train_kwargs: Any) -> None:
        try:
            super().run(n_epochs=n_epochs, **train_kwargs)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes all environments and their worker processes."""
        for env in self._envs:
            env.close()
        self._envs.clear()

    @abstractmethod
    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Builds a vector environment.

        :param env_factory: Makes one environment.
        :param concurrency: Number of environments.
        :param logging_prefix: Where their statistics are logged.
        """

    def _trainer_type(self) -> type[ActorCritic]:
        if not self.trainer_class:
            raise ConfigError("runner.trainer_class: expected the path of a trainer, such as `...ppo_trainer.PPO`.")
        return Factory(ActorCritic).type_from_name(self.trainer_class)  # type: ignore[type-abstract]  # a subclass

    def _build_model(self, device: str) -> TorchActorCritic:
        policy, critic = self.model_composer.policy, self.model_composer.critic
        missing = [name for name, part in (("policy", policy), ("critic", critic)) if part is None]
        if policy is None or critic is None:
            raise ConfigError(
                f"model.{missing[0]}: {self._trainer_type().__name__} needs a model with a policy and a state critic, "
                f"but no {missing[0]} is configured. Choose one, for instance with `model=flatten_concat` and "
                "`critic=flatten_concat_shared`."
            )
        policy.seed(self.maze_seeding.generate_agent_instance_seed())
        return TorchActorCritic(policy=policy, critic=critic, device=device)

    def _build_evaluator(self, config: Any, model_selection: BestModelSelection) -> Evaluator | None:
        if config is None or isinstance(config, Evaluator):
            return config
        n_episodes = config.get("n_episodes", MIN_CONCURRENCY) if isinstance(config, Mapping) else MIN_CONCURRENCY
        concurrency = self.eval_concurrency or max(1, min(n_episodes, _default_concurrency()))
        return Factory(Evaluator).instantiate(  # type: ignore[type-abstract]  # a subclass
            config, eval_env=self._vector_env(concurrency, "eval"), model_selection=model_selection
        )

    def _vector_env(self, concurrency: int, logging_prefix: str) -> StructuredVectorEnv:
        assert self.env_factory is not None
        # Evaluation learns no statistics: rewards of different epochs stay comparable.
        factory = FrozenEnvFactory(self.env_factory) if logging_prefix == "eval" else self.env_factory
        env = self.create_distributed_env(factory, concurrency, logging_prefix)
        self._envs.append(env)
        env.seed([self.maze_seeding.generate_env_instance_seed() for _ in range(concurrency)])
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


def _default_concurrency() -> int:
    return max(MIN_CONCURRENCY, os.cpu_count() or 1)
