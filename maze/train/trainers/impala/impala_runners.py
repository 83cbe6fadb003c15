"""Runners of IMPALA trainings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.utils.config_utils import whole_number
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.distributed_actors.sequential_distributed_actors import SequentialDistributedActors
from maze.train.parallelization.distributed_actors.subproc_distributed_actors import SubprocDistributedActors
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.trainers.common.model_selection.best_model_selection import BestModelSelection
from maze.train.trainers.common.resumption import CHECKPOINT_FILE
from maze.train.trainers.common.training_runner import TrainingRunner
from maze.train.trainers.impala.impala_algorithm_config import ImpalaAlgorithmConfig
from maze.train.trainers.impala.impala_trainer import IMPALA

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.torch_policy import TorchPolicy


@dataclass
class ImpalaRunner(TrainingRunner, ABC):
    """Builds model, actors, evaluator and trainer, and trains.

    :param eval_concurrency: Number of evaluation environments; 0: as many as episodes and CPU cores suggest.
    """

    eval_concurrency: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_number("runner.eval_concurrency", self.eval_concurrency, at_least=0)

    @override(TrainingRunner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        assert self.env_factory is not None
        config = ImpalaAlgorithmConfig.from_config(cfg.algorithm)
        model = self._build_actor_critic("IMPALA", config.device)
        model_selection = BestModelSelection(
            dump_file=self.state_dict_dump_file, model=model, dump_interval=self.dump_interval
        )
        try:
            actors = self.create_distributed_rollout_actors(
                self.env_factory,
                policy=model.policy,
                n_rollout_steps=config.n_rollout_steps,
                n_actors=config.num_actors,
                batch_size=config.actors_batch_size,
                queue_out_of_sync_factor=config.queue_out_of_sync_factor,
                env_instance_seeds=self._env_seeds(config.num_actors * config.envs_per_actor),
                agent_instance_seeds=[
                    self.maze_seeding.generate_agent_instance_seed() for _ in range(config.num_actors)
                ],
            )
            self._closing.append(actors.stop)
            self._trainer = IMPALA(
                algorithm_config=config,
                rollout_generator=actors,
                evaluator=self._rollout_evaluator(
                    config.rollout_evaluator, model_selection, self.create_distributed_eval_env, self.eval_concurrency
                ),
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
    def create_distributed_eval_env(
        self, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Builds the vector environment for evaluation.

        :param env_factory: Makes one environment.
        :param eval_concurrency: Number of environments.
        :param logging_prefix: Where their statistics are logged.
        """

    @abstractmethod
    def create_distributed_rollout_actors(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        env_instance_seeds: list[int],
        agent_instance_seeds: list[int],
    ) -> DistributedActors:
        """Builds the actors.

        :param env_factory: Makes one environment.
        :param policy: The policy.
        :param n_rollout_steps: Number of environment steps of a rollout.
        :param n_actors: Number of actors.
        :param batch_size: Number of rollouts in a batch.
        :param queue_out_of_sync_factor: Times ``batch_size``, the number of finished rollouts that may wait.
        :param env_instance_seeds: A seed for each environment: as many for each actor as it steps together.
        :param agent_instance_seeds: A seed for the policy of each actor.
        """


@dataclass
class ImpalaDevRunner(ImpalaRunner):
    """Actors take turns in the process of the training: reproducible, and easy to debug."""

    @override(ImpalaRunner)
    def create_distributed_rollout_actors(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        env_instance_seeds: list[int],
        agent_instance_seeds: list[int],
    ) -> SequentialDistributedActors:
        return SequentialDistributedActors(
            env_factory,
            policy,
            n_rollout_steps,
            n_actors,
            batch_size,
            env_instance_seeds,
            envs_per_actor=len(env_instance_seeds) // n_actors,
        )

    @override(ImpalaRunner)
    def create_distributed_eval_env(
        self, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> SequentialVectorEnv:
        return SequentialVectorEnv([env_factory] * eval_concurrency, logging_prefix=logging_prefix)


@dataclass
class ImpalaLocalRunner(ImpalaRunner):
    """Actors in processes of their own, which collect while the learner learns.

    :param start_method: How processes are started: `forkserver`, `spawn`, `fork`; `dummy` does without them.
    """

    start_method: str = "forkserver"

    @override(ImpalaRunner)
    def create_distributed_rollout_actors(
        self,
        env_factory: Callable[[], Any],
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        env_instance_seeds: list[int],
        agent_instance_seeds: list[int],
    ) -> SubprocDistributedActors | SequentialDistributedActors:
        envs_per_actor = len(env_instance_seeds) // n_actors
        sizes = (n_rollout_steps, n_actors, batch_size)
        if self.start_method == "dummy":
            return SequentialDistributedActors(
                env_factory, policy, *sizes, env_instance_seeds, envs_per_actor=envs_per_actor
            )
        return SubprocDistributedActors(
            env_factory,
            policy,
            *sizes,
            queue_out_of_sync_factor=queue_out_of_sync_factor,
            start_method=self.start_method,
            actor_env_seeds=env_instance_seeds,
            actor_agent_seeds=agent_instance_seeds,
            envs_per_actor=envs_per_actor,
        )

    @override(ImpalaRunner)
    def create_distributed_eval_env(
        self, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        if self.start_method == "dummy":
            return SequentialVectorEnv([env_factory] * eval_concurrency, logging_prefix=logging_prefix)
        return SubprocVectorEnv(
            [env_factory] * eval_concurrency, logging_prefix=logging_prefix, start_method=self.start_method
        )
