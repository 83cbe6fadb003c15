"""Environments in actors of Ray."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.utils.update_profile import TRANSFER, timed
from maze.train.parallelization.distributed_actors.actor_worker import ActingGroup, Fragment
from maze.train.parallelization.distributed_actors.distributed_actors import seed_of_start
from maze.train.parallelization.distributed_actors.env_groups import (
    Generators,
    GroupedVectorEnv,
    RolloutPlan,
    group_slices,
    seed_beside,
)
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket
from maze.train.parallelization.distributed_actors.shared_policy import (
    MadeOnce,
    PolicyCopy,
    copied_to_cpu,
    packed_weights,
    unpack_weights,
)
from maze.train.parallelization.on_ray.crew import Crew, Task
from maze.train.parallelization.placement import Placement
from maze.train.parallelization.vector_env.env_batch import check_same_spaces
from maze.train.parallelization.vector_env.stats_codec import decoded
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv

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
