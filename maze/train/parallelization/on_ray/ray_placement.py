"""Environments and actors on a cluster of Ray: `runner=ray`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import Unpack

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import whole_number
from maze.train.parallelization.distributed_actors.distributed_actors import DistributedActors
from maze.train.parallelization.distributed_actors.env_groups import group_sizes
from maze.train.parallelization.on_ray.crew import Crew
from maze.train.parallelization.on_ray.ray_actors import RayDistributedActors
from maze.train.parallelization.on_ray.ray_envs import RayVectorEnv, RemoteGroups
from maze.train.parallelization.on_ray.session import n_cpus, ray_session
from maze.train.parallelization.placement import (
    ActorsArguments,
    InProcess,
    Placement,
    Processes,
    arguments_of_actors,
)
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

OBJECT_STORE_BYTES = 512 * 2**20
"""Memory of a Ray that is started here; what is under way is bounded by counting."""


@dataclass
class OnRay(Placement):
    """Steps environments in actors of Ray, which act with copies of the policy: on this machine or on a cluster.

    :param address: Where Ray is: `auto` (the cluster that this machine belongs to) or `<host>:<port>`; `None`: one is
        started on this machine for the time of the run.
    :param cpus_per_actor: CPUs of each actor. Several are used by worker processes that step its environments.
    :param max_restarts: How often in a row an actor is replaced that vanishes, or whose environment fails, before the
        run ends.
    :param restart_pause: Seconds before the second replacement in a row, then twice as many each time, up to 30.
    :param start_timeout: Seconds that actors may wait for a place.
    :param wait_for: Share of the actors that an update of A2C and PPO waits for; 1: all, and results do not depend on
        speed. The others go on, and their fragments belong to a later update.
    :param max_fragment_age: Updates that such a fragment may be late; an older one is dropped.
    :param max_actors: Up to so many actors there are, where machines join that have room for more than at the start.
        IMPALA, evolution strategies, rollouts, and A2C and PPO with `wait_for` below 1 use them. 0: none beyond those.
    :param ray_config: Further arguments of `ray.init`.
    """

    address: str | None = None
    cpus_per_actor: int = 1
    max_restarts: int = 3
    restart_pause: float = 1.0
    start_timeout: float = 120.0
    wait_for: float = 1.0
    max_fragment_age: int = 1
    max_actors: int = 0
    ray_config: Mapping[str, Any] = field(default_factory=dict)

    env_groups = 0

    def __post_init__(self) -> None:
        whole_number("runner.placement.cpus_per_actor", self.cpus_per_actor, at_least=1)
        for name in ("max_restarts", "max_fragment_age", "max_actors"):
            whole_number(f"runner.placement.{name}", getattr(self, name), at_least=0)
        if not 0 < self.wait_for <= 1:
            raise ConfigError(f"runner.placement.wait_for: expected a share in (0, 1], found {self.wait_for!r}.")
        for name in ("restart_pause", "start_timeout"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"runner.placement.{name}: expected seconds, found {getattr(self, name)!r}.")
        self._crew: Crew | None = None
        self._session = ExitStack()
        self._names = itertools.count()

    @override(Placement)
    def vector_env(
        self, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None = None
    ) -> StructuredVectorEnv:
        crew = self.crew(n_envs)
        return RayVectorEnv(
            self._groups(crew, logging_prefix or "environments"),
            env_factory,
            group_sizes(n_envs, self.env_groups or crew.n_first),
            logging_prefix,
            self.wait_for if logging_prefix == "train" else 1.0,
            self.max_fragment_age,
        )

    @override(Placement)
    def actors(self, env_factory: Callable[[], Any], **arguments: Unpack[ActorsArguments]) -> DistributedActors:
        given = arguments_of_actors(env_factory, **arguments)
        crew = self.crew(given["n_actors"], given["n_actors"])
        return RayDistributedActors(self._groups(crew, "actors"), **given)

    def _groups(self, crew: Crew, name: str) -> RemoteGroups:
        inside: Placement = InProcess()
        # one process that steps environments can be ended where native code of theirs hangs; the actor itself cannot
        if self.cpus_per_actor > 1 or self.env_timeout is not None:
            inside = Processes(n_workers=self.cpus_per_actor)
            inside.env_timeout = self.env_timeout
        return RemoteGroups(crew, f"{name} {next(self._names)}", inside)

    @override(Placement)
    def crew(self, n_wanted: int, n_needed: int = 0) -> Crew:
        """The actors of the run, which all its environments share; they are started when they are first needed.

        :param n_wanted: Number of actors that there is work for, where `env_groups` does not say how many.
        :param n_needed: Number of actors that there have to be.
        """
        if self._crew is None:
            config: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES} if self.address is None else {}
            config.update(self.ray_config, address=self.address)
            n_asked = max(self.env_groups, n_needed) * self.cpus_per_actor
            self._session.enter_context(ray_session(config, n_asked, key="runner.address"))
            self._crew = Crew(self)
            self._session.callback(self._crew.close)
            n_places = max(1, min(n_wanted, math.floor(n_cpus() / self.cpus_per_actor)))
            self._crew.grow(self.env_groups or n_needed or n_places)
        self._crew.grow(n_needed)
        return self._crew

    @override(Placement)
    def close(self) -> None:
        self._crew = None
        self._session.close()

    @override(Placement)
    def join(self, address: str) -> None:
        self.address = address
