"""Environments and actors on a Ray cluster: `runner=ray`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.rollout.parallel_rollout_runner import DistributedRolloutRunner
from maze.core.utils.config_utils import whole_number
from maze.core.utils.factory import ConfigType
from maze.core.utils.worker_pool import TaskPool, env_slices
from maze.train.parallelization.distributed_actors.distributed_actors import ActorsAhead, DistributedActors
from maze.train.parallelization.distributed_actors.env_groups import EnvGroups, FirstFragments
from maze.train.parallelization.on_ray.cluster import ActorLimits, ActorPool, n_cpus, ray_session
from maze.train.parallelization.placement import InProcess, Placement, Processes, check_waiting, placement_of
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

OBJECT_STORE_BYTES = 512 * 2**20
"""Size of the object store of a Ray instance that the run starts itself."""


@dataclass
class OnRay(ActorLimits, Placement):
    """Step environments in actors of Ray with copies of the policy, on this machine or on a cluster.

    :param address: Address of Ray: `auto` (the cluster that this machine belongs to) or `<host>:<port>`; `None`: start
        Ray on this machine for the duration of the run.
    :param cpus_per_actor: Number of CPUs of each actor. With several, worker processes of the actor step its
        environments.
    :param max_restarts: Maximum number of consecutive replacements of an actor that is lost or whose environment
        fails; after that the run ends.
    :param restart_pause: Seconds before the second consecutive replacement; doubled each time, up to 30.
    :param start_timeout: Seconds that actors may wait for free CPUs.
    :param wait_for: Share of the actors that an update of A2C and PPO waits for, and of the rollouts that an update of
        SAC and DQN waits for; 1: all, so results do not depend on timing. The other actors continue; their fragments
        belong to a later update.
    :param max_fragment_age: Maximum age of such a fragment in updates of A2C and PPO; older fragments are dropped.
    :param max_actors: Maximum number of actors when machines join the cluster; 0: as many as at the start. IMPALA,
        evolution strategies, rollouts, and A2C and PPO with `wait_for` below 1 use additional actors.
    :param ray_config: Further arguments of `ray.init`.
    """

    address: str | None = None
    wait_for: float = 1.0
    max_fragment_age: int = 1
    ray_config: Mapping[str, Any] = field(default_factory=dict)

    env_groups = 0

    def __post_init__(self) -> None:
        whole_number("runner.placement.cpus_per_actor", self.cpus_per_actor, at_least=1)
        whole_number("runner.placement.max_actors", self.max_actors, at_least=0)
        check_waiting(self)
        for name in ("restart_pause", "start_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"runner.placement.{name}: expected seconds, found {getattr(self, name)!r}.")
        self._pool: ActorPool | None = None
        self._session = ExitStack()
        self._names = itertools.count()

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        pool = self.actor_pool(n_envs)
        return FirstFragments(
            self._groups(pool, logging_prefix or "environments"),
            env_factory,
            env_slices(n_envs, self.env_groups or pool.n_first),
            logging_prefix,
            self.wait_for if logging_prefix == "train" else 1.0,
            self.max_fragment_age,
            is_shared=True,
        )

    @override(Placement)
    def actors(self, **arguments: Any) -> DistributedActors:
        pool = self.actor_pool(arguments["n_actors"], arguments["n_actors"])
        groups = self._groups(pool, "actors")
        return ActorsAhead(**arguments, make_groups=lambda: groups)

    def _groups(self, pool: ActorPool, name: str) -> EnvGroups:
        inside: Placement = InProcess()
        # a worker process of the actor can be killed when native code of an environment hangs; the actor itself cannot
        if self.cpus_per_actor > 1 or self.env_timeout is not None:
            inside = Processes(n_workers=self.cpus_per_actor)
            inside.env_timeout = self.env_timeout
        return EnvGroups(pool, f"{name} {next(self._names)}", inside.vector_env)

    @override(Placement)
    def actor_pool(self, n_wanted: int, n_needed: int = 0) -> ActorPool:
        """Return the actors of the run, which all its environments share; the first call starts them.

        :param n_wanted: Number of actors if `env_groups` is 0, limited by the CPUs of the cluster.
        :param n_needed: Minimum number of actors.
        """
        if self._pool is None:
            config: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES} if self.address is None else {}
            config.update(self.ray_config, address=self.address)
            n_cpus_needed = max(self.env_groups, n_needed) * self.cpus_per_actor
            self._session.enter_context(ray_session(config, n_cpus_needed, key="runner.address"))
            self._pool = ActorPool(self)
            self._session.callback(self._pool.close)
            n_possible = max(1, min(n_wanted, math.floor(n_cpus() / self.cpus_per_actor)))
            self._pool.grow(self.env_groups or n_needed or n_possible)
        self._pool.grow(n_needed)
        return self._pool

    @override(Placement)
    def close(self) -> None:
        self._pool = None
        self._session.close()


class RayRolloutRunner(DistributedRolloutRunner):
    """Distribute the episodes over actors of Ray; each episode is delivered once, also if actors are lost.

    :param placement: The execution backend, or its configuration.
    :param address: Address of Ray, see :class:`~maze.train.parallelization.on_ray.ray_placement.OnRay`.
    :param env_groups: Number of actors; 0: number of CPUs.
    :param arguments: Arguments of :class:`~maze.core.rollout.rollout_runner.RolloutRunner`.
    """

    sends_files: ClassVar[bool] = True

    def __init__(
        self,
        *arguments: Any,
        placement: ConfigType = "ray",
        address: str | None = None,
        env_groups: int = 0,
        **rest: Any,
    ) -> None:
        super().__init__(*arguments, **rest)
        self.placement = placement_of(placement, address, env_groups)

    @contextmanager
    @override(DistributedRolloutRunner)
    def _pool(self) -> Iterator[TaskPool]:
        try:
            pool = self.placement.actor_pool(self.n_episodes)
            assert pool is not None, "this runner needs a Ray placement"
            yield pool
        finally:
            self.placement.close()
