"""Environments and actors on a cluster of Ray: `runner=ray`."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from typing_extensions import Unpack

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.utils.config_utils import whole_number
from maze.core.utils.update_profile import TRANSFER, timed
from maze.train.parallelization.distributed_actors.distributed_actors import (
    ActorsAhead,
    DistributedActors,
    Work,
    seed_of_start,
)
from maze.train.parallelization.distributed_actors.env_groups import (
    ActingGroup,
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
    PolicyCopy,
    copied_to_cpu,
    packed_weights,
    unpack_weights,
)
from maze.train.parallelization.on_ray.crew import Crew, Task
from maze.train.parallelization.on_ray.session import n_cpus, ray_session
from maze.train.parallelization.placement import (
    ActorsArguments,
    InProcess,
    Placement,
    Processes,
    arguments_of_actors,
)
from maze.train.parallelization.vector_env.env_batch import ActorSpaces, check_same_spaces
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import decoded

logger = logging.getLogger(__name__)


class RemoteGroup(ActingGroup):
    """A group of environments in an actor, which gets the policy that acts with each call.

    :param placement: Makes the environments, in the actor or in worker processes of its own.
    :param env_factory: Makes one environment.
    :param n_envs: Number of environments.
    :param arguments: Those of :class:`ActingGroup`.
    """

    def __init__(self, placement: Placement, env_factory: Callable[[], Any], n_envs: int, *arguments: Any) -> None:
        super().__init__(placement.vector_env(env_factory, n_envs), *arguments)
        self._token = -1

    @override(ActingGroup)
    def collect(self, *arguments: Any) -> Fragment:
        """Collects a rollout; see :meth:`_act`."""
        return self._act(super().collect, *arguments)

    @override(ActingGroup)
    def play(self, *arguments: Any) -> Fragment:
        """Plays episodes; see :meth:`_act`."""
        return self._act(super().play, *arguments)

    def _act(
        self, act: Any, token: int, structure: np.ndarray, weights: Any, generators: Generators, *more: Any
    ) -> Fragment:
        """Has the policy act.

        :param act: A method that takes it, and returns a fragment.
        :param token: Tells policies apart.
        :param structure: The pickled policy, uint8 `[n_bytes]`.
        :param weights: Its weights, uint8 `[n_bytes]`; `None`: those that it was pickled with.
        :param generators: What it draws from.
        :param more: The further arguments of the method.
        """
        is_new, self._token = token != self._token, token
        if is_new:
            self._copy = PolicyCopy(structure.tobytes())
        policy, has_network = self._copy.policy, weights is not None
        if has_network:
            unpack_weights(weights, self._copy.live_weights)
        if has_network or is_new:  # others go on by themselves
            generators.hand_to(policy)
        fragment: Fragment = act(policy, *more)
        return fragment._replace(generators=policy.rng_state()) if has_network else fragment


class RemoteGroups:
    """Groups of environments in actors, whatever they are asked for.

    :param crew: The actors; each of the first ones hosts a group.
    :param name: A name for these environments among all that the actors host.
    :param inside: Makes the environments of an actor, there.
    """

    def __init__(self, crew: Crew, name: str, inside: Placement) -> None:
        self.crew, self._name, self._inside = crew, name, inside
        self._policy: MadeOnce[Any] = MadeOnce()
        self.learned: dict[int, list[Any]] = {}
        """What the wrappers of each group have learned."""

    def open(
        self, env_factory: Callable[[], Any], sizes: Sequence[int], seeds: Callable[[], list[Any]], may_join: bool
    ) -> ActorSpaces:
        """Makes the environments, and waits for them.

        :param env_factory: Makes one environment.
        :param sizes: Number of environments of each group.
        :param seeds: Gives a seed for each environment, as they are now; empty: they are told later. What begins anew,
            and groups of actors that join, have other ones that follow from these.
        :param may_join: Whether actors that join get a group as well.
        :return: What all environments have in common.
        """
        groups = group_slices(sizes)

        def maker(index: int, n_starts: int) -> Callable[[], RemoteGroup]:
            nth, first = divmod(index, len(sizes))
            own = [seed_of_start(seed_of_start(seed, n_starts), nth) for seed in seeds()[groups[first]]]
            arguments = (env_factory, sizes[first], f"Group {index}", own, self.learned.get(index, []))
            return partial(RemoteGroup, self._inside, *arguments)

        self.crew.place(self._name, maker, None if may_join else len(sizes))
        spaces: list[ActorSpaces] = self.call("spaces", [()] * len(sizes))
        for group, of_group in zip(groups, spaces, strict=True):
            check_same_spaces(spaces[0], of_group, group.start)
        return spaces[0]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Has groups call a method at the same time; see :class:`RemoteGroup`."""
        return self.crew.call(self._name, method, arguments)

    def submit(self, index: int, method: str, *arguments: Any) -> Task:
        """Has one group call a method."""
        return self.crew.submit(index, self._name, method, *arguments)

    @timed(TRANSFER)
    def hand_over(self, policy: Any) -> tuple[int, Any, Any]:
        """Stores a policy for all: its structure once, its weights each time.

        :return: The first arguments of :meth:`RemoteGroup.collect` and :meth:`RemoteGroup.play`.
        """
        has_network = isinstance(policy, TorchPolicy)
        structure = self._policy.of(policy, lambda: self.crew.publish(copied_to_cpu(policy) if has_network else policy))
        weights = self.crew.put(packed_weights(policy.state_dict())) if has_network else None
        return self._policy.n_made, structure, weights

    @timed(TRANSFER)
    def take(self, index: int, fragment: Fragment, statistics: LogStatsAggregator) -> RolloutPacket | None:
        """Takes in what a group says besides its rollout.

        :param statistics: Takes its episodes.
        :return: The rollout.
        """
        for episode in decoded(fragment.episodes):
            statistics.receive(episode)
        if fragment.wrappers:
            self.learned[index] = fragment.wrappers
        return fragment.packet


class RayVectorEnv(GroupedVectorEnv):
    """Environments in actors of Ray, each of which acts for its group with a copy of the policy.

    :param groups: Where they are.
    :param env_factory: Makes one environment.
    :param sizes: Number of environments of each group.
    :param logging_prefix: Where epoch statistics are logged (`train`, `eval`); `None`: nowhere.
    :param wait_for: Share of the groups that a rollout holds. Below 1, the fragments that come first are taken; groups
        that are late go on, and deliver to a later rollout, and actors that join have groups of their own.
    :param max_age: Rollouts that a fragment may be late; one that is older is dropped.
    :raises ConfigError: Groups differ in size, but a rollout does not wait for all.
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
        self._remote, self._crew = groups, groups.crew
        self._n_wanted, self._max_age = math.ceil(wait_for * len(sizes) - 1e-9), max_age
        is_first = self._n_wanted < len(sizes)
        if is_first and len(set(sizes)) > 1:
            raise ConfigError(
                f"runner.placement.wait_for: fragments that take one another's place have to be of the same size, but "
                f"{sum(sizes)} environments in {len(sizes)} groups are not; set runner.concurrency to a multiple."
            )
        self._under_way: dict[Task, int] = {}
        """Fragments that were begun, and for which rollout."""
        self._n_rollouts = 0
        self._ages: list[int] = []
        self._seeds = []
        self._may_join = is_first and len(sizes) == self._crew.n_first
        super().__init__(sizes, groups.open(env_factory, sizes, lambda: self._seeds, self._may_join), logging_prefix)

    @override(GroupedVectorEnv)
    def _collect(self, policy: Policy, plan: RolloutPlan) -> Iterable[RolloutPacket]:
        n_restarts = self._crew.work.n_restarts
        self._n_rollouts += 1
        if self.n_rollout_envs < self.n_envs:
            return self._collect_first(policy, plan)
        packets = [fragment.packet for fragment in self._act(policy, "collect", [(plan,)] * len(self.groups))]
        if self._crew.work.n_restarts > n_restarts:
            logger.warning("From this rollout on, results differ from those of a run in which nothing is lost.")
        return packets

    def _collect_first(self, policy: Policy, plan: RolloutPlan) -> list[RolloutPacket]:
        """The fragments that come first, those that are late from before included."""
        assert isinstance(policy, TorchPolicy), "the logits of policies that acted are needed"
        if plan.begins:
            self._under_way.clear()
        state, copies = policy.rng_state(), self._remote.hand_over(policy)
        self._crew.join_new()
        n_groups = self._crew.n_actors if self._may_join else len(self.groups)
        policy.seed(seed_beside(state, n_groups))

        def begin(index: int) -> None:
            task = self._remote.submit(index, "collect", *copies, Generators(seed=seed_beside(state, index)), plan)
            self._under_way[task] = self._n_rollouts

        for index in set(range(n_groups)) - {task.actor for task in self._under_way}:
            begin(index)
        taken: list[RolloutPacket] = []
        while len(taken) < self._n_wanted:
            # a group that is late begins again as soon as it has delivered: nobody else is waited for meanwhile
            is_late = min(self._under_way.values()) < self._n_rollouts
            for task in self._crew.finished(list(self._under_way), 1 if is_late else self._n_wanted - len(taken)):
                self._ages.append(self._n_rollouts - self._under_way.pop(task))
                packet = self._remote.take(task.actor, task.result, self.epoch_stats)
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
        if self._n_rollouts:  # evaluations are no work of an epoch
            events = self._crew.take_work().report(self.epoch_stats)
            for age in self._ages:
                events.fragment_age(value=age)
                events.fragments_dropped(value=int(age > self._max_age))
            self._ages.clear()

    @override(GroupedVectorEnv)
    def _act(self, policy: Policy, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        copies, drawn = self._remote.hand_over(policy), self._generators(policy)
        asked = [(*copies, of_group, *more) for of_group, more in zip(drawn, arguments, strict=True)]
        fragments: list[Fragment] = self._remote.call(method, asked)
        if isinstance(policy, TorchPolicy):
            policy.set_rng_state(fragments[0].generators)
        for index, fragment in enumerate(fragments):
            self._remote.take(index, fragment, self.epoch_stats)
        return fragments

    @override(GroupedVectorEnv)
    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._remote.call("ask", [(method, *of_group) for of_group in arguments])

    @override(StructuredVectorEnv)
    def close(self) -> None:
        """The actors close them when they end."""


class RayDistributedActors(ActorsAhead):
    """Collects rollouts in actors of Ray while the learner learns; those that join meanwhile take part.

    A rollout is one call, made with the newest policy at the time its ticket is issued: nothing else is sent, and a
    call that is lost is made again. What an actor draws depends on its seed and the number of the call.

    :param groups: The environments; there are at least as many actors as `n_actors`.
    :param arguments: Those of :class:`ActorsAhead`.
    """

    def __init__(self, groups: RemoteGroups, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._groups = groups
        self._learned = groups.learned
        self._tasks: dict[Task, int] = {}
        """Rollouts under way, with the versions of their policies."""
        self._is_running = False
        self._may_join = groups.crew.n_first == self.n_actors
        self._plan = RolloutPlan(self.n_rollout_steps, with_logits=True, keeps_terminal=False, begins=False)

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
        """What is under way ends by itself; nobody asks for it."""
        self._tasks.clear()
        self._is_running = False

    @override(DistributedActors)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        if self._is_running:  # those who start later take the policy itself
            self._tickets.updated()
            self._weights = self._groups.hand_over(self.policy)

    @override(ActorsAhead)
    def _work_done(self) -> Work:
        return self._groups.crew.take_work()

    @override(ActorsAhead)
    def _issue(self, actor: int) -> None:
        numbers = [self._seeds_now()[1][actor % self.n_actors], *([actor] if actor >= self.n_actors else [])]
        drawn = np.random.SeedSequence([*numbers, self._n_issued[actor]]).generate_state(1, np.uint64)
        self._n_issued[actor] += 1
        asked = (*self._weights, Generators(seed=int(drawn[0])), self._plan)
        self._tasks[self._groups.submit(actor, "collect", *asked)] = self._tickets.version

    @override(ActorsAhead)
    def _receive(self, wait: bool) -> None:
        self._groups.crew.join_new()
        self._begin_new()
        for task in self._groups.crew.finished(list(self._tasks), wait=wait):
            packet = self._groups.take(task.actor, task.result, self.epoch_stats)
            assert packet is not None, "it was asked for a rollout"
            self._arrived.append((task.actor, packet, self._tasks.pop(task)))

    def _begin_new(self) -> None:
        """Gives actors that are new their tickets."""
        n_actors = self._groups.crew.n_actors if self._may_join else self.n_actors
        for actor in range(len(self._n_issued), n_actors):
            self._n_issued.append(0)
            if actor >= self._tickets.n_actors:
                self._tickets.add_actor()
            for _ in range(self._tickets.n_issued(actor)):
                self._issue(actor)


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
