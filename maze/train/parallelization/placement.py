"""Execution backends (`runner.placement`): environments in the training process, in worker processes, on a cluster."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory
from maze.core.utils.worker_pool import ProcessPool, env_slices
from maze.train.parallelization.distributed_actors.env_groups import EnvGroups, FirstFragments, in_groups
from maze.train.parallelization.vector_env.sequential_vector_env import in_sequence
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import check_same_spaces

if TYPE_CHECKING:
    from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
        BaseDistributedWorkersWithBuffer,
    )
    from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
    from maze.train.parallelization.on_ray.cluster import ActorPool


class Placement(ABC):
    """Execution backend: makes vector environments and actors. Trainers do not depend on the backend.

    A further backend is one subclass: A2C, PPO, SAC and all evaluations need :meth:`vector_env` only; :meth:`actors` is
    for trainers that learn while actors collect.
    """

    in_process: ClassVar[bool] = False
    """Whether all environments are in the training process."""

    env_timeout: float | None = None
    """Seconds that a step or a reset of an environment may take. A wrapper of the environment raises an error after
    that; the backend ends worker processes in which native code of the environment does not return."""

    wait_for: float = 1.0
    """Share of the fragments that an update waits for; 1: all, so results do not depend on timing."""

    env_groups: int = 1
    """Number of groups of environments with a policy each, see
    :class:`~maze.train.parallelization.distributed_actors.env_groups.GroupedVectorEnv`."""

    @abstractmethod
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        """Make a vector environment.

        :param env_factory: Makes one environment.
        :param n_envs: Number of environments.
        :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); `None`: they are not logged.
        """

    @abstractmethod
    def actors(self, **arguments: Any) -> DistributedActors:
        """Make actors that collect rollouts with copies of a policy while it learns.

        :param arguments: Arguments of
            :class:`~maze.train.parallelization.distributed_actors.distributed_actors.ActorsAhead`.
        """

    def actor_pool(self, n_wanted: int, n_needed: int = 0) -> ActorPool | None:
        """Return the actors of a cluster, for work other than stepping environments.

        :param n_wanted: Number of actors that can be used.
        :param n_needed: Minimum number of actors.
        :return: `None`: this backend has no cluster.
        """
        return None

    def close(self) -> None:
        """Release the resources shared by all environments, which are closed already."""

    def workers(self, **arguments: Any) -> BaseDistributedWorkersWithBuffer:
        """Make workers that collect rollouts into a replay buffer; all backends collect the same if they wait for all.

        :param arguments: Arguments of `BaseDistributedWorkersWithBuffer`.
        """
        from maze.train.parallelization.distributed_actors.dummy_distributed_workers_with_buffer import (
            DummyDistributedWorkersWithBuffer,
            FirstFragmentWorkers,
        )

        if self.wait_for < 1:
            return FirstFragmentWorkers(**arguments, make_env=self.vector_env, wait_for=self.wait_for)
        return DummyDistributedWorkersWithBuffer(**arguments, make_env=self.vector_env)


class InProcess(Placement):
    """Step all environments in the training process: the fastest choice for cheap environments."""

    in_process = True

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        return in_groups(self.env_groups, env_factory, n_envs, logging_prefix, in_sequence)

    @override(Placement)
    def actors(self, **arguments: Any) -> DistributedActors:
        from maze.train.parallelization.distributed_actors.sequential_distributed_actors import (
            SequentialDistributedActors,
        )

        for name in ("queue_out_of_sync_factor", "actor_agent_seeds"):  # there is no queue and only one policy
            del arguments[name]
        return SequentialDistributedActors(**arguments)


@dataclass
class Processes(Placement):
    """Step the environments in worker processes: faster if a step takes much longer than sending an action.

    With `wait_for` below 1, `max_restarts` or `threads` above 1, each group of environments has a copy of the policy.

    :param start_method: Start method of processes: `forkserver`, `spawn` or `fork`; `None`: `forkserver` if available.
    :param n_workers: Number of worker processes of a vector environment; `None`: number of CPUs, or of groups, which
        is `runner.env_groups` or otherwise the number of environments.
    :param wait_for: Share of the groups that an update of A2C and PPO waits for, and of the rollouts that an update of
        SAC and DQN waits for; 1: all, so results do not depend on timing. The other groups continue; their fragments
        belong to a later update.
    :param max_fragment_age: Maximum age of such a fragment in updates of A2C and PPO; older fragments are dropped.
    :param max_restarts: Maximum number of consecutive replacements of a process that ends or whose environment fails.
    :param threads: Number of groups, or of actors of IMPALA, that a process steps, each in a thread. For environments
        that wait in their steps; those of a process end together.
    """

    start_method: str | None = None
    n_workers: int | None = None
    wait_for: float = 1.0
    max_fragment_age: int = 1
    max_restarts: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        check_waiting(self)
        whole_number("runner.placement.threads", self.threads, at_least=1)

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        timeout = self._timeout()
        if self.wait_for < 1 or self.max_restarts or self.threads > 1:
            groups = env_slices(n_envs, self.env_groups if self.env_groups > 1 else self.n_workers or n_envs)
            pool = ProcessPool(
                len(groups),
                self.start_method,
                groups,
                timeout,
                n_slots=len(groups) + 8,  # of the policy's parameters, each of which late fragments may still use
                modules=[EnvGroups.__module__],
                max_restarts=self.max_restarts,
                n_threads=self.threads,
            )
            share = self.wait_for if logging_prefix == "train" else 1.0
            actors = EnvGroups(pool, "environments", in_sequence)
            return FirstFragments(actors, env_factory, groups, logging_prefix, share, self.max_fragment_age)

        def make_env(factory: Callable[[], Any], n: int, prefix: str | None = None) -> SubprocVectorEnv:
            return SubprocVectorEnv([factory] * n, prefix, self.start_method, self.n_workers, timeout=timeout)

        return in_groups(self.env_groups, env_factory, n_envs, logging_prefix, make_env)

    @override(Placement)
    def actors(self, **arguments: Any) -> DistributedActors:
        from maze.train.parallelization.distributed_actors.subproc_distributed_actors import SubprocDistributedActors

        return SubprocDistributedActors(
            **arguments,
            start_method=self.start_method or "forkserver",
            timeout=self._timeout(),
            max_restarts=self.max_restarts,
            n_threads=self.threads,
        )

    def _timeout(self) -> float | None:
        if self.threads > 1 and self.env_timeout is not None:
            raise ConfigError(
                f"runner.env_timeout: environments in threads have no time limit; found {self.env_timeout:g} s and "
                f"runner.placement.threads={self.threads}. Set one of them to its default."
            )
        return None if self.env_timeout is None else math.inf


class Batched(Placement):
    """Step all environments at once in a vectorised simulation; see
    :class:`~maze.core.env.batched_core_env.BatchedCoreEnv` and
    :class:`~maze.core.wrappers.gym_vector_env.GymBatch`. Wrappers of single environments cannot be used."""

    in_process = True

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        from maze.train.parallelization.vector_env.batched_vector_env import BatchedVectorEnv

        env = unwrapped = env_factory()
        wrappers = []
        # compare real classes: wrappers imitate the class of the wrapped environment
        while CoreEnv not in type(unwrapped.__dict__["_wrapped_env"]).__mro__:
            wrappers.append(type(unwrapped).__name__)
            unwrapped = unwrapped.env
        try:
            if wrappers or not hasattr(type(unwrapped), "batch"):
                found = ", ".join([*wrappers, type(unwrapped).__name__])
                raise ConfigError(
                    "runner.placement=batched: expected an environment with a vectorised simulation (a BatchedMazeEnv) "
                    f"without wrappers, found {found}. Use runner.placement=in_process or processes."
                )
            batched = BatchedVectorEnv(unwrapped.batch(n_envs), logging_prefix)
            check_same_spaces(env, batched, "runner.placement=batched: the vectorised simulation")
            return batched
        finally:
            env.close()

    @override(Placement)
    def actors(self, **arguments: Any) -> DistributedActors:
        raise ConfigError(
            "runner.placement=batched: this algorithm needs actors, which a vectorised simulation does not have. Use "
            "A2C, PPO, SAC or DQN, or another placement."
        )


PLACEMENTS: Mapping[str, str] = {
    "in_process": f"{__name__}.InProcess",
    "processes": f"{__name__}.Processes",
    "batched": f"{__name__}.Batched",
    "ray": "maze.train.parallelization.on_ray.ray_placement.OnRay",
}
"""Execution backends by their names in configurations."""


def check_waiting(placement: Any) -> None:
    """Check the numbers of a placement whose groups of environments need not wait for each other.

    :param placement: Has `wait_for`, `max_fragment_age` and `max_restarts`.
    :raises ConfigError: A number is out of its range.
    """
    for name in ("max_restarts", "max_fragment_age"):
        whole_number(f"runner.placement.{name}", getattr(placement, name), at_least=0)
    if not (isinstance(placement.wait_for, int | float) and 0 < placement.wait_for <= 1):
        raise ConfigError(f"runner.placement.wait_for: expected a share in (0, 1], found {placement.wait_for!r}.")


def placement_of(
    config: ConfigType, address: str | None = None, env_groups: int = 0, env_timeout: float | None = None
) -> Placement:
    """Build the execution backend that a runner is configured with.

    :param config: A name in `PLACEMENTS`, a placement, or its configuration.
    :param address: Address of the cluster; `None`: the placement's own.
    :param env_groups: Number of groups of environments; 0: the placement's own.
    :param env_timeout: Seconds that a step or a reset of an environment may take; `None`: no limit.
    :raises ConfigError: The placement does not exist, or has no cluster for the address.
    """
    if isinstance(config, str):
        if config not in PLACEMENTS:
            raise ConfigError(
                f"runner.placement: expected one of {', '.join(PLACEMENTS)} or the configuration of a Placement, found "
                f"{config!r}."
            )
        config = {TARGET_KEY: PLACEMENTS[config]}
    placement = Factory(Placement).instantiate(  # type: ignore[type-abstract]  # a subclass
        config, config_path="runner.placement"
    )
    placement.env_timeout = env_timeout
    if address is not None:
        if not hasattr(placement, "address"):
            found = type(placement).__name__
            raise ConfigError(f"runner.address: {address} needs runner=ray; found the placement {found}.")
        placement.address = address
    placement.env_groups = env_groups or placement.env_groups
    return placement
