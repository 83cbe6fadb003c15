"""The environments of a run: what they look like, where they are stepped, and that they are closed."""

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
from maze.core.wrappers.reward_wrappers import FrozenEnvFactory
from maze.core.wrappers.time_limit_wrapper import checked_time_limit
from maze.perception.models.space_config import SpacesConfig
from maze.runner import Runner
from maze.train.parallelization.placement import Batched, placed
from maze.train.parallelization.vector_env.env_batch import CheckedEnvFactory

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

PROBE = "the environment that is asked for its spaces"

MIN_CONCURRENCY = 8
"""Number of environments where neither the user nor the number of CPU cores asks for more."""


class PlacedRunner(Runner):
    """A runner that makes environments, seeds them, has them stepped where its placement says, and closes them."""

    placement: Any
    """A :class:`~maze.train.parallelization.placement.Placement`, or how it is configured until :meth:`setup`."""
    concurrency: int
    eval_concurrency: int
    env_timeout: float | None
    env_groups: int
    address: str | None
    normalization_samples: int
    env_factory: Callable[[], Any] | None
    """Makes one environment with all its wrappers; available after :meth:`setup`, as what follows."""
    spaces: SpacesConfig
    """Spaces of the environment."""
    normalization_statistics: StructuredStatisticsType | None
    """Statistics for observation normalization; `None` where nothing is normalized."""

    default_placement: ClassVar[str] = "in_process"
    replaced_arguments: ClassVar[Mapping[str, str]] = {}
    """Numbers of environments that this algorithm has under another name, and that name."""

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
        """Reads how environments are made, and asks one of them for its spaces and normalization statistics."""
        is_open = self.placement is None and self.default_placement == "in_process"
        self.placement = placed(
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
        """Closes all environments and ends their worker processes."""
        for close in reversed(self._closing):
            close()
        self._closing.clear()

    # -- what a trainer asks for -----------------------------------------------------------------------

    @property
    def n_training_envs(self) -> int:
        """Number of training environments."""
        return self.concurrency or self._num_envs or default_concurrency()

    def rollouts(
        self, env_factory: Callable[[], Any] | None = None, seeds: Sequence[int] | None = None
    ) -> RolloutGenerator:
        """What rolls a policy out in the training environments, as many as `concurrency` says.

        :param env_factory: Makes one environment; `None`: that of the run.
        :param seeds: A seed for each of them; `None`: the next ones.
        """
        env = self._seeded_env(env_factory or self.env_factory, self.n_training_envs, "train", seeds)
        may_be_late = env.n_rollout_envs < env.n_envs  # then by a policy that is not the newest: its logits are needed
        return RolloutGenerator(env, record_logits=may_be_late)

    def actors(self, **arguments: Any) -> DistributedActors:
        """Actors that collect rollouts while the trainer learns.

        :param arguments: Those of :meth:`~maze.train.parallelization.placement.Placement.actors`, without the
            environment.
        """
        actors = self._make_actors(env_factory=self.env_factory, **arguments)
        self._closing.append(actors.stop)
        return actors

    def workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """What collects rollouts into a replay buffer.

        :param arguments: Those of `BaseDistributedWorkersWithBuffer`, without the environment.
        """
        workers = self._make_workers(env_factory=self.env_factory, **arguments)
        self._closing.append(workers.stop)
        workers.start()
        return workers

    def evaluation_env(
        self, n_episodes: int, env_factory: Callable[[], Any] | None = None, n_envs: int = 0
    ) -> StructuredVectorEnv:
        """Environments for evaluation; they learn no statistics, so that evaluations of different epochs compare.

        :param n_episodes: Number of episodes of an evaluation.
        :param env_factory: Makes one environment; `None`: that of the training.
        :param n_envs: Number of environments; 0: as `eval_concurrency` says.
        """
        factory = self.env_factory if env_factory is None else env_factory
        assert factory is not None, "setup comes first"
        n_envs = n_envs or self.eval_concurrency or max(1, min(n_episodes, default_concurrency()))
        return self._seeded_env(FrozenEnvFactory(factory), n_envs, "eval")

    def agent_seed(self) -> int:
        """The next seed for something that acts or learns."""
        return self.maze_seeding.generate_agent_instance_seed()

    def env_seeds(self, n_envs: int) -> list[int]:
        """The next seeds for environments.

        :param n_envs: How many.
        """
        return [self.maze_seeding.generate_env_instance_seed() for _ in range(n_envs)]

    # -- where it is placed ----------------------------------------------------------------------------

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
        """Closes environments before the run ends.

        :param env: As :meth:`rollouts` made them.
        """
        self._closing.remove(env.close)
        env.close()

    def create_distributed_env(
        self, env_factory: Callable[[], Any], concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """Builds a vector environment.

        :param env_factory: Makes one environment.
        :param concurrency: Number of environments.
        :param logging_prefix: Where their statistics are logged.
        """
        return self.create_distributed_eval_env(env_factory, concurrency, logging_prefix)

    def create_distributed_eval_env(
        self, env_factory: Callable[[], Any], eval_concurrency: int, logging_prefix: str
    ) -> StructuredVectorEnv:
        """The same, as runners are asked for it whose only vector environment is that of evaluations."""
        env: StructuredVectorEnv = self.placement.vector_env(env_factory, eval_concurrency, logging_prefix)
        return env

    def _make_actors(self, **arguments: Any) -> DistributedActors:
        actors: DistributedActors = self.placement.actors(**arguments)
        return actors

    def _make_workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        workers: BaseDistributedWorkersWithBuffer = self.placement.workers(**arguments)
        return workers


def default_concurrency() -> int:
    """Number of environments where nobody says how many."""
    return max(MIN_CONCURRENCY, os.cpu_count() or 1)
