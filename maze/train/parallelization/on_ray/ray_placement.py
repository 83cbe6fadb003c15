"""Environments and actors on a Ray cluster: `runner=ray`."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import cloudpickle
import numpy as np

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.config_utils import whole_number
from maze.core.utils.update_profile import TRANSFER, timed
from maze.train.parallelization.distributed_actors.distributed_actors import (
    ActorsAhead,
    DistributedActors,
    seed_of_start,
)
from maze.train.parallelization.distributed_actors.env_groups import (
    EnvGroup,
    Fragment,
    Generators,
    GroupedVectorEnv,
    RolloutPacket,
    RolloutPlan,
    group_sizes,
    group_slices,
    seed_beside,
)
from maze.train.parallelization.distributed_actors.shared_policy import (
    MadeOnce,
    copied_to_cpu,
    packed_weights,
    unpack_weights,
)
from maze.train.parallelization.on_ray.actor_pool import ActorLimits, ActorPool, Task
from maze.train.parallelization.on_ray.session import n_cpus, ray_session
from maze.train.parallelization.placement import InProcess, Placement, Processes
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import (
    ActorSpaces,
    StatsDecoder,
    StatsEncoder,
    check_same_spaces,
)

logger = logging.getLogger(__name__)


class RemoteGroup(EnvGroup):
    """A group of environments in an actor of Ray; each call passes the policy.

    :param placement: Makes the environments, in the actor or in worker processes of the actor.
    :param env_factory: Makes one environment.
    :param n_envs: Number of environments.
    :param arguments: Further arguments of :class:`EnvGroup`.
    """

    def __init__(self, placement: Placement, env_factory: Callable[[], Any], n_envs: int, *arguments: Any) -> None:
        super().__init__(placement.vector_env(env_factory, n_envs), *arguments)
        self._token = -1

    @override(EnvGroup)
    def collect(self, *arguments: Any) -> Fragment:  # type: ignore[override]  # the policy is pickled
        """Collect a rollout; see :meth:`_act`."""
        return self._act(super().collect, *arguments)

    @override(EnvGroup)
    def play(self, *arguments: Any) -> Fragment:  # type: ignore[override]  # the policy is pickled
        """Play episodes; see :meth:`_act`."""
        return self._act(super().play, *arguments)

    def _act(
        self, act: Any, token: int, structure: np.ndarray, weights: Any, generators: Generators, *more: Any
    ) -> Fragment:
        """Call a method of :class:`EnvGroup` with the policy.

        :param act: The method.
        :param token: Number of the policy.
        :param structure: The pickled policy, uint8 `[n_bytes]`.
        :param weights: Its weights, uint8 `[n_bytes]`; `None`: the weights in the pickled policy.
        :param generators: Random generators of the policy.
        :param more: Further arguments of the method.
        """
        is_new, self._token = token != self._token, token
        if is_new:
            self._policy = cloudpickle.loads(structure.tobytes())
        policy, has_network = self._policy, weights is not None
        if has_network:
            unpack_weights(weights, policy.state_dict())
        if has_network or is_new:  # other policies continue with their own generators
            generators.hand_to(policy)
        fragment = self.fragment(act(policy, *more), StatsEncoder())
        return fragment._replace(generators=policy.rng_state()) if has_network else fragment


class RemoteGroups:
    """Groups of environments in the actors of a pool.

    :param pool: The actors; each of the first ones hosts a group.
    :param name: Name of these environments among all hosted objects.
    :param inside: Makes the environments of an actor, in the actor.
    """

    def __init__(self, pool: ActorPool, name: str, inside: Placement) -> None:
        self.pool, self._name, self._inside = pool, name, inside
        self._policy: MadeOnce[Any] = MadeOnce()
        self.learned: dict[int, list[Any]] = {}
        """Group -> statistics that the wrappers of its environments have learned."""

    def open(
        self, env_factory: Callable[[], Any], sizes: Sequence[int], seeds: Callable[[], list[Any]], may_join: bool
    ) -> ActorSpaces:
        """Make the environments and wait for them.

        :param env_factory: Makes one environment.
        :param sizes: Number of environments of each group.
        :param seeds: Returns the current seed of each environment; empty: they are seeded later. Restarted actors and
            actors that join get seeds derived from these.
        :param may_join: Whether actors that join get a group as well.
        :return: The spaces that all environments have in common.
        """
        groups = group_slices(sizes)

        def maker(index: int, n_starts: int) -> Callable[[], RemoteGroup]:
            nth, first = divmod(index, len(sizes))
            own = [seed_of_start(seed_of_start(seed, n_starts), nth) for seed in seeds()[groups[first]]]
            arguments = (env_factory, sizes[first], f"Group {index}", own, self.learned.get(index, []))
            return partial(RemoteGroup, self._inside, *arguments)

        self.pool.host(self._name, maker, None if may_join else len(sizes))
        spaces: list[ActorSpaces] = self.call("spaces", [()] * len(sizes))
        for group, of_group in zip(groups, spaces, strict=True):
            check_same_spaces(spaces[0], of_group, f"environment {group.start}")
        return spaces[0]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of all groups in parallel; see :class:`RemoteGroup`."""
        return self.pool.call(self._name, method, arguments)

    def submit(self, index: int, method: str, *arguments: Any) -> Task:
        """Submit a call of a method of one group."""
        return self.pool.submit(index, self._name, method, *arguments)

    @timed(TRANSFER)
    def hand_over(self, policy: Any) -> tuple[int, Any, Any]:
        """Store a policy for all actors: its structure once, its weights in each call.

        :return: The first arguments of :meth:`RemoteGroup.collect` and :meth:`RemoteGroup.play`.
        """
        has_network = isinstance(policy, TorchPolicy)
        structure = self._policy.of(policy, lambda: self.pool.publish(copied_to_cpu(policy) if has_network else policy))
        weights = self.pool.put(packed_weights(policy.state_dict())) if has_network else None
        return self._policy.n_made, structure, weights


class RayVectorEnv(GroupedVectorEnv):
    """Environments in actors of Ray; each actor steps one group with a copy of the policy.

    :param groups: The groups in the actors.
    :param env_factory: Makes one environment.
    :param sizes: Number of environments of each group.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); `None`: they are not logged.
    :param wait_for: Share of the groups in a rollout. Below 1, the first fragments are taken; late groups continue and
        deliver to a later rollout, and actors that join get their own groups.
    :param max_age: Maximum age of a fragment in rollouts; older fragments are dropped.
    :raises ConfigError: The groups differ in size, although a rollout does not wait for all of them.
    """

    def __init__(
        self,
        groups: RemoteGroups,
        env_factory: Callable[[], Any],
        sizes: Sequence[int],
        logging_prefix: str | None,
        wait_for: float = 1.0,
        max_age: int = 1,
    ) -> None:
        self._remote, self._pool = groups, groups.pool
        self._n_wanted, self._max_age = math.ceil(wait_for * len(sizes) - 1e-9), max_age
        is_first = self._n_wanted < len(sizes)
        if is_first and len(set(sizes)) > 1:
            raise ConfigError(
                f"runner.placement.wait_for: below 1, all groups need the same number of environments; found "
                f"{sum(sizes)} environments in {len(sizes)} groups. Set runner.concurrency to a multiple of the number "
                "of groups."
            )
        self._under_way: dict[Task, int] = {}
        """Fragments in progress, with the number of their rollout."""
        self._n_rollouts = 0
        self._ages: list[int] = []
        self._seeds = []
        self._may_join = is_first and len(sizes) == self._pool.n_first
        super().__init__(sizes, groups.open(env_factory, sizes, lambda: self._seeds, self._may_join), logging_prefix)

    @override(GroupedVectorEnv)
    def _collect(self, policy: Policy, plan: RolloutPlan) -> Iterable[RolloutPacket]:
        n_restarts = self._pool.work.n_restarts
        self._n_rollouts += 1
        if self.n_rollout_envs < self.n_envs:
            return self._collect_first(policy, plan)
        packets = [fragment.packet for fragment in self._act(policy, "collect", [(plan,)] * len(self.groups))]
        if self._pool.work.n_restarts > n_restarts:
            logger.warning("An actor was lost: from this rollout on, results differ from those of a run without loss.")
        return packets

    def _collect_first(self, policy: Policy, plan: RolloutPlan) -> list[RolloutPacket]:
        """Return the fragments that finish first, including late fragments of earlier rollouts."""
        assert isinstance(policy, TorchPolicy), "only a TorchPolicy has the logits that late fragments need"
        if plan.begins:
            self._under_way.clear()
        state, copies = policy.rng_state(), self._remote.hand_over(policy)
        self._pool.join_new()
        n_groups = self._pool.n_actors if self._may_join else len(self.groups)
        policy.seed(seed_beside(state, n_groups))

        def begin(index: int) -> None:
            task = self._remote.submit(index, "collect", *copies, Generators(seed=seed_beside(state, index)), plan)
            self._under_way[task] = self._n_rollouts

        for index in set(range(n_groups)) - {task.actor for task in self._under_way}:
            begin(index)
        taken: list[RolloutPacket] = []
        while len(taken) < self._n_wanted:
            # a late group starts its next fragment at once, so wait for a single fragment while there are late ones
            is_late = min(self._under_way.values()) < self._n_rollouts
            for task in self._pool.finished(list(self._under_way), 1 if is_late else self._n_wanted - len(taken)):
                self._ages.append(self._n_rollouts - self._under_way.pop(task))
                packet = self._take(task.actor, task.result)
                if self._ages[-1] <= self._max_age and packet is not None:
                    taken.append(packet)
                if self._ages[-1]:
                    begin(task.actor)
        return taken

    @property
    @override(StructuredVectorEnv)
    def n_rollout_envs(self) -> int:
        return int(self.groups[self._n_wanted - 1].stop)

    @override(StructuredVectorEnv)
    def report_work(self) -> None:
        if self._n_rollouts:  # not for evaluations
            events = self._pool.report_work(self.epoch_stats)
            for age in self._ages:
                events.fragment_age(value=age)
                events.fragments_dropped(value=int(age > self._max_age))
            self._ages.clear()

    @override(GroupedVectorEnv)
    def _act(self, policy: Policy, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        copies, drawn = self._remote.hand_over(policy), self._generators(policy)
        all_arguments = [(*copies, of_group, *more) for of_group, more in zip(drawn, arguments, strict=True)]
        fragments: list[Fragment] = self._remote.call(method, all_arguments)
        if isinstance(policy, TorchPolicy):
            policy.set_rng_state(fragments[0].generators)
        for index, fragment in enumerate(fragments):
            self._take(index, fragment)
        return fragments

    @timed(TRANSFER)
    def _take(self, index: int, fragment: Fragment) -> RolloutPacket | None:
        """Return the rollout of a fragment after recording its statistics."""
        decoder = StatsDecoder()
        for episode in fragment.episodes:
            self.epoch_stats.receive(decoder.decode(episode))
        if fragment.wrappers:
            self._remote.learned[index] = fragment.wrappers
        return fragment.packet

    @override(GroupedVectorEnv)
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._remote.call("call", [(method, *of_group) for of_group in arguments])

    @override(StructuredVectorEnv)
    def close(self) -> None:
        """Do nothing: the actors close their environments when they end."""


class RayDistributedActors(ActorsAhead):
    """Collects rollouts in actors of Ray while the learner learns; actors that join later take part.

    A rollout is one call with the newest policy at the time when its ticket is issued. A lost call is repeated. The
    random numbers of an actor depend on its seed and the number of the call.

    :param groups: The environments; the pool has at least `n_actors` actors.
    :param arguments: Arguments of :class:`ActorsAhead`.
    """

    def __init__(self, groups: RemoteGroups, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._groups = groups
        self._learned = groups.learned
        self._tasks: dict[Task, int] = {}
        """Rollouts in progress, with the versions of their policies."""
        self._is_running = False
        self._may_join = groups.pool.n_first == self.n_actors

    @override(DistributedActors)
    def start(self) -> None:
        if self._is_running:
            return
        self._open()
        self._n_issued: list[int] = []
        sizes = [self.envs_per_actor] * self.n_actors
        self._spaces = self._groups.open(self.env_factory, sizes, lambda: self._seeds_now()[0], self._may_join)
        self._weights = self._groups.hand_over(self.policy)
        self._is_running = True
        self._begin_new()

    @override(DistributedActors)
    def stop(self) -> None:
        """Discard the rollouts in progress."""
        self._tasks.clear()
        self._is_running = False

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._is_running:  # actors that are started later receive the policy itself
            self._tickets.updated()
            self._weights = self._groups.hand_over(self.policy)

    @override(ActorsAhead)
    def _report_work(self) -> None:
        self._groups.pool.report_work(self.epoch_stats)

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        numbers = [self._seeds_now()[1][actor % self.n_actors], *([actor] if actor >= self.n_actors else [])]
        drawn = np.random.SeedSequence([*numbers, self._n_issued[actor]]).generate_state(1, np.uint64)
        self._n_issued[actor] += 1
        arguments = (*self._weights, Generators(seed=int(drawn[0])), self._plan)
        self._tasks[self._groups.submit(actor, "collect", *arguments)] = self._tickets.version

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        self._groups.pool.join_new()
        self._begin_new()
        for task in self._groups.pool.finished(list(self._tasks), wait=wait):
            packet = self._take(task.actor, task.result, StatsDecoder())
            self._arrived.append((task.actor, packet, self._tasks.pop(task)))

    def _begin_new(self) -> None:
        """Issue the tickets of new actors."""
        n_actors = self._groups.pool.n_actors if self._may_join else self.n_actors
        for actor in range(len(self._n_issued), n_actors):
            self._n_issued.append(0)
            if actor >= self._tickets.n_actors:
                self._tickets.add_actor()
            for _ in range(self._tickets.n_issued(actor)):
                self._issue(actor)


OBJECT_STORE_BYTES = 512 * 2**20
"""Size of the object store of a Ray instance that the run starts itself."""


@dataclass
class OnRay(ActorLimits, Placement):
    """Steps environments in actors of Ray with copies of the policy, on this machine or on a cluster.

    :param address: Address of Ray: `auto` (the cluster that this machine belongs to) or `<host>:<port>`; `None`: start
        Ray on this machine for the duration of the run.
    :param cpus_per_actor: Number of CPUs of each actor. With several, worker processes of the actor step its
        environments.
    :param max_restarts: Maximum number of consecutive replacements of an actor that is lost or whose environment
        fails; after that the run ends.
    :param restart_pause: Seconds before the second consecutive replacement; doubled each time, up to 30.
    :param start_timeout: Seconds that actors may wait for free CPUs.
    :param wait_for: Share of the actors that an update of A2C and PPO waits for; 1: all, so results do not depend on
        timing. The other actors continue; their fragments belong to a later update.
    :param max_fragment_age: Maximum age of such a fragment in updates; older fragments are dropped.
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
        for name in ("max_restarts", "max_fragment_age", "max_actors"):
            whole_number(f"runner.placement.{name}", getattr(self, name), at_least=0)
        if not 0 < self.wait_for <= 1:
            raise ConfigError(f"runner.placement.wait_for: expected a share in (0, 1], found {self.wait_for!r}.")
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
        return RayVectorEnv(
            self._groups(pool, logging_prefix or "environments"),
            env_factory,
            group_sizes(n_envs, self.env_groups or pool.n_first),
            logging_prefix,
            self.wait_for if logging_prefix == "train" else 1.0,
            self.max_fragment_age,
        )

    @override(Placement)
    def actors(self, **arguments: Any) -> DistributedActors:
        pool = self.actor_pool(arguments["n_actors"], arguments["n_actors"])
        return RayDistributedActors(self._groups(pool, "actors"), **arguments)

    def _groups(self, pool: ActorPool, name: str) -> RemoteGroups:
        inside: Placement = InProcess()
        # a worker process of the actor can be killed when native code of an environment hangs; the actor itself cannot
        if self.cpus_per_actor > 1 or self.env_timeout is not None:
            inside = Processes(n_workers=self.cpus_per_actor)
            inside.env_timeout = self.env_timeout
        return RemoteGroups(pool, f"{name} {next(self._names)}", inside)

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

    @override(Placement)
    def join(self, address: str) -> None:
        self.address = address
