"""Base of runners with environments: spaces, execution backend, seeds, closing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from maze.core.annotations import override
from maze.core.env.faults import USER_CODE_ERRORS, Place, closed, fail
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.config_utils import EnvFactory, whole_number
from maze.core.wrappers.gym_vector_env import GymVectorMazeEnv
from maze.core.wrappers.observation_normalization.normalization_strategies.base import StructuredStatisticsType
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import estimated_statistics
from maze.core.wrappers.return_normalization_reward_wrapper import FrozenEnvFactory
from maze.core.wrappers.time_limit_wrapper import checked_time_limit
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.placement import Batched, placement_of
from maze.train.parallelization.vector_env.vector_env_utils import CheckedEnvFactory, check_same_spaces

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

PROBE = "the environment that provides the spaces"

MIN_CONCURRENCY = 8
"""Minimum number of environments by default."""


class BackendRunner(Runner):
    """Make environments with an execution backend, seed and close them."""

    placement: Any
    """A :class:`~maze.train.parallelization.placement.Placement`; before :meth:`setup`, its configuration."""
    concurrency: int
    eval_concurrency: int
    env_timeout: float | None
    env_groups: int
    address: str | None
    normalization_samples: int
    env_factory: Callable[[], Any] | None
    """Makes one environment with all its wrappers. Available after :meth:`setup`, like the following attributes."""
    spaces: SpacesConfig
    """Spaces of the environment."""
    normalization_statistics: StructuredStatisticsType | None
    """Statistics for observation normalization; `None`: nothing is normalized."""

    default_placement: ClassVar[str] = "in_process"
    replaced_arguments: ClassVar[Mapping[str, str]] = {}
    """Arguments for numbers of environments that this algorithm replaces -> name of the replacement."""

    def __post_init__(self) -> None:
        self._closing: list[Callable[[], None]] = []
        self._num_envs: int | None = None
        self.normalization_statistics = None
        self.env_timeout = checked_time_limit("runner.env_timeout", self.env_timeout)
        whole_number("runner.env_groups", self.env_groups, at_least=0)
        for name in ("concurrency", "eval_concurrency"):
            n_envs = whole_number(f"runner.{name}", getattr(self, name), at_least=0)
            if n_envs and name in self.replaced_arguments:
                raise ConfigError(f"runner.{name}: leave it 0 and set {self.replaced_arguments[name]} instead.")

    def _find_environments(self, cfg: DictConfig) -> None:
        """Build environment factory and execution backend; read spaces and normalization statistics."""
        is_open = self.placement is None and self.default_placement == "in_process"
        self.placement = placement_of(
            self.placement or self.default_placement, self.address, self.env_groups, self.env_timeout
        )
        self._closing.append(self.placement.close)
        factory = EnvFactory(cfg.env, cfg.get("wrappers") or {}, self.env_timeout)
        try:
            env = factory()
        except USER_CODE_ERRORS as error:
            fail(error, Place(PROBE), "the factory")
        if is_open and type(env) is GymVectorMazeEnv:  # with wrappers it is of another class
            self.placement, self._num_envs = Batched(), env.num_envs
        call = "seed"
        try:
            env.seed(self.env_seeds(1)[0])
            call = "reset or step"
            self.normalization_statistics, normalized = estimated_statistics(
                env, factory, self.normalization_samples, cfg.get("input_dir")
            )
            self.spaces = SpacesConfig(env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict)
        except USER_CODE_ERRORS as error:
            fail(error, Place.of(env, PROBE), call)
        finally:
            closed(env.close, PROBE)
        self.env_factory = CheckedEnvFactory(normalized, self.spaces)

    @override(Runner)
    def close(self) -> None:
        """Close all environments and end their worker processes."""
        for close in reversed(self._closing):
            close()
        self._closing.clear()

    def closing(self, close: Callable[[], None]) -> None:
        """Have something closed together with the environments.

        :param close: Closes it.
        """
        self._closing.append(close)

    # -- for trainers ----------------------------------------------------------------------------------

    @property
    def n_training_envs(self) -> int:
        """Number of training environments."""
        return self.concurrency or self._num_envs or default_concurrency()

    def rollouts(
        self, env_factory: Callable[[], Any] | None = None, seeds: Sequence[int] | None = None
    ) -> RolloutGenerator:
        """Return a rollout generator for `concurrency` training environments.

        :param env_factory: Makes one environment; `None`: the factory of the run.
        :param seeds: A seed for each environment; `None`: the next seeds of the run.
        """
        env = self._seeded_env(env_factory or self.env_factory, self.n_training_envs, "train", seeds)
        may_be_late = env.n_rollout_envs < env.n_envs  # late fragments need the logits of their older policy
        return RolloutGenerator(env, record_logits=may_be_late)

    def actors(self, **arguments: Any) -> DistributedActors:
        """Return actors that collect rollouts while the trainer learns.

        :param arguments: Arguments of :meth:`create_distributed_rollout_actors` except `env_factory`.
        """
        actors = self.create_distributed_rollout_actors(env_factory=self.env_factory, **arguments)
        self._closing.append(actors.stop)
        return actors

    def create_distributed_rollout_actors(
        self,
        env_factory: Callable[[], Any] | None,
        policy: TorchPolicy,
        n_rollout_steps: int,
        n_actors: int,
        batch_size: int,
        queue_out_of_sync_factor: float,
        env_instance_seeds: list[int],
        agent_instance_seeds: list[int],
    ) -> DistributedActors:
        """Build actors with the execution backend.

        :param env_factory: Makes one environment.
        :param policy: The policy; actors use copies of it.
        :param n_rollout_steps: Number of environment steps of a rollout.
        :param n_actors: Number of actors.
        :param batch_size: Number of rollouts in a batch.
        :param queue_out_of_sync_factor: Maximum number of finished rollouts in the queue, in units of `batch_size`.
        :param env_instance_seeds: A seed for each environment; their number divided by `n_actors` is the number of
            environments of each actor.
        :param agent_instance_seeds: A seed for the policy of each actor.
        """
        actors: DistributedActors = self.placement.actors(
            env_factory=env_factory,
            policy=policy,
            n_rollout_steps=n_rollout_steps,
            n_actors=n_actors,
            batch_size=batch_size,
            queue_out_of_sync_factor=queue_out_of_sync_factor,
            actor_env_seeds=env_instance_seeds,
            actor_agent_seeds=agent_instance_seeds,
            envs_per_actor=len(env_instance_seeds) // n_actors,
        )
        return actors

    def workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """Return workers that collect rollouts into a replay buffer.

        :param arguments: Arguments of `BaseDistributedWorkersWithBuffer` except `env_factory`.
        """
        workers = self.create_distributed_rollout_workers(env_factory=self.env_factory, **arguments)
        self._closing.append(workers.stop)
        workers.start()
        return workers

    def evaluation_env(
        self, n_episodes: int, env_factory: Callable[[], Any] | None = None, n_envs: int = 0
    ) -> StructuredVectorEnv:
        """Return environments for evaluation; their wrappers do not update statistics, so evaluations are comparable.

        :param n_episodes: Number of episodes of an evaluation.
        :param env_factory: Makes one environment; `None`: the factory of the run.
        :param n_envs: Number of environments; 0: `eval_concurrency`.
        """
        factory = self.env_factory if env_factory is None else env_factory
        assert factory is not None, "setup comes first"
        n_envs = n_envs or self.eval_concurrency or max(1, min(n_episodes, default_concurrency()))
        env = self._seeded_env(FrozenEnvFactory(factory), n_envs, "eval")
        check_same_spaces(self.spaces, env, "environment")  # its factory may be another one
        return env

    def agent_seed(self) -> int:
        """Return the next seed for a policy or trainer."""
        return self.maze_seeding.generate_agent_instance_seed()

    def env_seeds(self, n_envs: int) -> list[int]:
        """Return the next seeds for environments.

        :param n_envs: Number of seeds.
        """
        return [self.maze_seeding.generate_env_instance_seed() for _ in range(n_envs)]

    # -- execution backend -----------------------------------------------------------------------------

    def _seeded_env(
        self,
        env_factory: Callable[[], Any] | None,
        n_envs: int,
        logging_prefix: str,
        seeds: Sequence[int] | None = None,
    ) -> StructuredVectorEnv:
        assert env_factory is not None, "setup comes first"
        env = self.create_distributed_env(env_factory, n_envs, logging_prefix)
        self._closing.append(env.close)
        env.seed(self.env_seeds(n_envs) if seeds is None else seeds)
        return env

    def give_back(self, env: StructuredVectorEnv) -> None:
        """Close environments before the run ends.

        :param env: The environments of :meth:`rollouts`.
        """
        self._closing.remove(env.close)
        env.close()

    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Build a vector environment.

        :param env_factory: Makes one environment.
        :param concurrency: Number of environments.
        :param logging_prefix: Prefix of the epoch statistics.
        """
        return self.create_distributed_eval_env(env_factory, concurrency, logging_prefix)

    def create_distributed_eval_env(
        self, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Build a vector environment for evaluations; parameters as in :meth:`create_distributed_env`."""
        env: StructuredVectorEnv = self.placement.vector_env(env_factory, eval_concurrency, logging_prefix)
        return env

    def create_distributed_rollout_workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """Build workers with the execution backend; the arguments are those of `BaseDistributedWorkersWithBuffer`."""
        workers: BaseDistributedWorkersWithBuffer = self.placement.workers(**arguments)
        return workers


def default_concurrency() -> int:
    """Return the default number of environments."""
    return max(MIN_CONCURRENCY, os.cpu_count() or 1)
