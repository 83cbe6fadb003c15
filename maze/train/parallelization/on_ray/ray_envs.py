"""Environments in actors of Ray."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator
from maze.core.rollout.batched_acting import play_episodes
from maze.core.utils.update_profile import TRANSFER, timed
from maze.core.wrappers.running_statistics import statistics_states
from maze.train.parallelization.distributed_actors.distributed_actors import seed_of_start
from maze.train.parallelization.distributed_actors.env_groups import (
    EnvGroup,
    EpisodeRelay,
    GroupedVectorEnv,
    RolloutPlan,
    seed_beside,
)
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket
from maze.train.parallelization.distributed_actors.shared_policy import packed_weights, unpack_weights
from maze.train.parallelization.on_ray.cluster_events import report_actors
from maze.train.parallelization.on_ray.crew import Crew, Published, Task
from maze.train.parallelization.vector_env.env_batch import check_same_spaces
from maze.train.parallelization.vector_env.replay_log import states_for
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.stats_codec import EncodedStats, StatsEncoder, decoded
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy

logger = logging.getLogger(__name__)


class Generators(NamedTuple):
    """What a copy of a policy draws its actions from."""

    state: Any = None
    """State of its generators; `None`: they begin with the seed."""
    seed: int | None = None
    """`None`: they go on."""


class Fragment(NamedTuple):
    """What comes back from an actor."""

    packet: RolloutPacket | None
    episodes: list[EncodedStats]
    generators: Any
    """State of the policy's generators afterwards."""
    wrappers: list[Any]
    """What the wrappers of each environment have learned; empty: nothing learns."""


class RemoteGroup:
    """A group of environments, and a copy of the policy, in an actor.

    :param env_factory: Makes one environment.
    :param n_envs: Number of environments.
    :param index: Which group it is.
    :param n_workers: Number of worker processes that step them; 0: they are stepped in the actor itself.
    :param timeout: Seconds that a call of a worker process may take.
    :param seeds: A seed for each environment; empty: they are told later.
    :param wrappers: What wrappers have learned before.
    """

    def __init__(
        self,
        env_factory: Callable[[], Any],
        n_envs: int,
        index: int,
        n_workers: int,
        timeout: float | None,
        seeds: Sequence[Any],
        wrappers: Sequence[Any],
    ) -> None:
        env: StructuredVectorEnv
        if n_workers:
            env = SubprocVectorEnv([env_factory] * n_envs, n_workers=n_workers, timeout=timeout)
        else:
            env = SequentialVectorEnv([env_factory] * n_envs)
        self._env = env
        self._episodes: list[LogStats] = []
        env.epoch_stats = EpisodeRelay(self._episodes.append)
        self._group = EnvGroup(env, index)
        self._token = -1
        self._policy: Any = None
        if seeds:
            env.seed(seeds)
        if any(wrappers):
            env.load_state_dict({"environments": [{"wrappers": learned, "problem": ""} for learned in wrappers]})

    def spaces(self) -> ActorSpaces:
        """The spaces of the environments."""
        return ActorSpaces.of(self._env)

    def collect(
        self, token: int, structure: np.ndarray, weights: Any, generators: Generators, plan: RolloutPlan
    ) -> Fragment:
        """Collects a rollout.

        :param token: Tells policies apart.
        :param structure: The pickled policy, uint8 `[n_bytes]`.
        :param weights: Its weights, uint8 `[n_bytes]`; `None`: those that it was pickled with.
        :param generators: What it draws from.
        :param plan: What is collected.
        """
        policy = self._acting(token, structure, weights, generators)
        return self._fragment(self._group.collect(policy, plan), policy)

    def play(
        self,
        token: int,
        structure: np.ndarray,
        weights: Any,
        generators: Generators,
        quota: np.ndarray,
        deterministic: bool,
    ) -> Fragment:
        """Plays episodes; see :meth:`collect`."""
        policy = self._acting(token, structure, weights, generators)
        self._episodes.clear()
        play_episodes(policy, self._env, quota.copy(), deterministic)
        return self._fragment(None, policy)

    def ask(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the vector environment."""
        return getattr(self._env, method)(*arguments)

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()

    def _fragment(self, packet: RolloutPacket | None, policy: Any) -> Fragment:
        state = policy.rng_state() if isinstance(policy, TorchPolicy) else None
        learned = [statistics_states(env) for env in getattr(self._env, "envs", ())]
        encoder = StatsEncoder()  # each fragment can be decoded by itself
        episodes = [encoder.encode(stats) for stats in self._episodes]
        self._episodes.clear()
        return Fragment(packet, episodes, state, learned if any(learned) else [])

    def _acting(self, token: int, structure: np.ndarray, weights: Any, generators: Generators) -> Any:
        if token != self._token:
            self._policy, self._token = cloudpickle.loads(structure.tobytes()), token
            if isinstance(self._policy, TorchPolicy):
                self._policy.eval()
                self._live_weights = self._policy.state_dict()
            elif generators.seed is not None:
                self._policy.seed(generators.seed)
        policy = self._policy
        if isinstance(policy, TorchPolicy):
            unpack_weights(weights, self._live_weights)
            if generators.state is not None:
                policy.set_rng_state(generators.state)
            elif generators.seed is not None:
                policy.seed(generators.seed)
        return policy


class RemoteGroups:
    """Groups of environments in actors, whatever they are asked for.

    :param crew: The actors; each of the first ones hosts a group.
    :param name: A name for these environments among all that the actors host.
    :param n_workers: Number of worker processes in each actor; 0: environments are stepped in the actor itself.
    :param timeout: Seconds that a call of a worker process may take; `None`: any time.
    """

    def __init__(self, crew: Crew, name: str, n_workers: int, timeout: float | None) -> None:
        self.crew = crew
        self._name, self._n_workers, self._timeout = name, n_workers, timeout
        self._policy = Published(crew)
        self.learned: dict[int, list[Any]] = {}
        """What the wrappers of each group have learned."""

    def open(
        self,
        env_factory: Callable[[], Any],
        sizes: Sequence[int],
        seeds_of: Callable[[int, int], Sequence[Any]],
        may_join: bool = False,
    ) -> ActorSpaces:
        """Makes the environments, and waits for them.

        :param env_factory: Makes one environment.
        :param sizes: Number of environments of each group.
        :param seeds_of: Seeds of a group, and of how many starts before: what begins anew must not repeat itself.
        :param may_join: Whether actors that join get a group as well, as large as the last one.
        :return: What all environments have in common.
        """

        def maker(index: int, n_starts: int) -> Callable[[], RemoteGroup]:
            n_envs = sizes[min(index, len(sizes) - 1)]
            n_workers, seeds = min(self._n_workers, n_envs), seeds_of(index, n_starts)
            learned = self.learned.get(index, [])
            return partial(RemoteGroup, env_factory, n_envs, index, n_workers, self._timeout, seeds, learned)

        self.crew.place(self._name, maker, None if may_join else len(sizes))
        spaces: list[ActorSpaces] = self.call("spaces", [()] * len(sizes))
        for index, of_group in enumerate(spaces):
            check_same_spaces(spaces[0], of_group, sum(sizes[:index]))
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
        if not isinstance(policy, TorchPolicy):
            return *self._policy.of(policy, lambda: policy), None
        return *self._policy.of(policy, lambda: _on_cpu(policy)), self.crew.put(packed_weights(policy.state_dict()))

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


def _on_cpu(policy: TorchPolicy) -> TorchPolicy:
    portable = copy.deepcopy(policy)
    portable.to("cpu")
    return portable


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
        self._sizes = list(sizes)
        self._is_made = self._has_collected = False
        self._may_join = is_first and len(sizes) == self._crew.n_first
        super().__init__(sizes, groups.open(env_factory, sizes, self._seeds_of, self._may_join), logging_prefix)
        self._is_made = True

    def _seeds_of(self, index: int, n_starts: int) -> list[Any]:
        """Seeds of a group; none while it is made for the first time."""
        if not self._is_made:
            return []
        n_joined = max(0, index + 1 - len(self.groups))  # a group of an actor that has joined is no group's twin
        seeds = self._seeds[self.groups[index - n_joined]]
        return [seed_of_start(seed_of_start(seed, n_starts), n_joined) for seed in seeds]

    @override(GroupedVectorEnv)
    def _collect(self, policy: Policy, plan: RolloutPlan) -> Iterable[RolloutPacket]:
        self._has_collected, n_restarts = True, self._crew.n_restarts
        if self.n_rollout_envs < self.n_envs:
            return self._collect_first(policy, plan)
        fragments = self._act(policy, "collect", [(plan,)] * len(self.groups))
        if self._crew.n_restarts > n_restarts:
            logger.warning("From this rollout on, results differ from those of a run in which nothing is lost.")
        return [fragment.packet for fragment in fragments if fragment.packet is not None]

    def _collect_first(self, policy: Policy, plan: RolloutPlan) -> list[RolloutPacket]:
        """The fragments that come first, those that are late from before included."""
        assert isinstance(policy, TorchPolicy), "the logits of policies that acted are needed"
        if plan.begins:
            self._under_way.clear()
        self._n_rollouts += 1
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
        return sum(self._sizes[: self._n_wanted])

    @override(StructuredVectorEnv)
    def write_epoch_stats(self) -> None:
        if self._has_collected:  # evaluations are no work of an epoch
            events = report_actors(self._crew, self.epoch_stats)
            for age in self._ages:
                events.fragment_age(value=age)
                events.fragments_dropped(value=int(age > self._max_age))
            self._ages.clear()
        super().write_epoch_stats()

    @override(GroupedVectorEnv)
    def play_episodes(self, policy: Policy, quota: np.ndarray, deterministic: bool) -> None:
        self._act(policy, "play", [(quota[group], deterministic) for group in self.groups])

    def _act(self, policy: Policy, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Fragment]:
        """Has all groups act at the same time, and takes in what they say besides their rollouts."""
        copies, before = self._remote.hand_over(policy), None
        if isinstance(policy, TorchPolicy):
            before = policy.rng_state()
        drawn = [self._generators(before, index) for index in range(len(self.groups))]
        asked = [(*copies, of_group, *more) for of_group, more in zip(drawn, arguments, strict=True)]
        fragments: list[Fragment] = self._remote.call(method, asked)
        if isinstance(policy, TorchPolicy):
            policy.set_rng_state(fragments[0].generators)
        for index, fragment in enumerate(fragments):
            self._remote.take(index, fragment, self.epoch_stats)
        return fragments

    def _generators(self, before: Mapping[str, Any] | None, index: int) -> Generators:
        if before is None:  # a policy of somebody's own, whose copies go on by themselves
            return Generators(seed=self._seed_of_copy(index) if index else None)
        return Generators(seed=seed_beside(before, index)) if index else Generators(before)

    @override(GroupedVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        super().seed(seeds)
        self._ask("seed", [(self._seeds[group],) for group in self.groups])

    @override(StructuredVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        states = self._ask("state_dict", [(with_running,)] * len(self.groups))
        return {"environments": [state for of_group in states for state in of_group["environments"]]}

    @override(StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        states = states_for(state_dict, self.n_envs)
        answers = self._ask("load_state_dict", [({"environments": states[group]},) for group in self.groups])
        return {
            group.start + index: problem
            for group, problems in zip(self.groups, answers, strict=True)
            for index, problem in problems.items()
        }

    @override(StructuredVectorEnv)
    def close(self) -> None:
        """The actors close them when they end."""

    def _ask(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._remote.call("ask", [(method, *of_group) for of_group in arguments])
