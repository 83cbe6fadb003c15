"""Groups of environments, each with a policy of its own.

Rollouts depend on the number of groups, not on the execution backend: groups in this process, in worker processes and
in actors of Ray collect the same.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import EnvironmentContractError, NonFiniteError
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator, LogStatsKey, LogStatsLevel, split_columns
from maze.core.rollout.batched_acting import logits_shapes_of, play_episodes
from maze.core.rollout.rollout_columns import FinalObservationEntry, RolloutColumns, SubstepColumns
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.update_profile import TRANSFER, timed
from maze.core.utils.worker_pool import env_slices
from maze.core.wrappers.reward_wrappers import statistics_states
from maze.train.parallelization.task_pool import (
    MadeOnce,
    Task,
    TaskPool,
    copied_to_cpu,
    packed_weights,
    unpack_weights,
    unpublished,
)
from maze.train.parallelization.vector_env.structured_vector_env import DividedVectorEnv, StructuredVectorEnv
from maze.train.parallelization.vector_env.vector_env_utils import (
    ActorSpaces,
    EncodedStats,
    check_same_spaces,
    decode_stats,
    encode_stats,
)

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.env.structured_env import ActorID, StepKeyType
    from maze.train.trainers.common.model_selection.selection_criterion import StatisticSource


Row = dict[str, np.ndarray]
MakeEnv = Callable[[Callable[[], Any], int], StructuredVectorEnv]


class SubstepPacket(NamedTuple):
    """Arrays of one sub-step key; see :class:`~maze.core.rollout.rollout_columns.SubstepColumns`."""

    observations: Row
    actions: Row
    logits: Row | None
    agent_ids: np.ndarray
    ticks: np.ndarray
    valid: np.ndarray | None


class RolloutPacket(NamedTuple):
    """A rollout as plain arrays: views of the columns of its group, or arrays from another process."""

    substeps: dict[StepKeyType, SubstepPacket]
    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    step_complete: np.ndarray
    constrained: np.ndarray
    actor_rewards: np.ndarray | None
    actor_done: np.ndarray | None
    final_observations: list[FinalObservationEntry]
    terminal_observations: list[FinalObservationEntry]
    last_actor_ids: list[ActorID]
    actor_sequence: list[ActorID] | None

    @classmethod
    def of(cls, columns: RolloutColumns) -> RolloutPacket:
        """Return views of the rollout in columns."""
        substeps = {
            key: SubstepPacket(*(getattr(part, name) for name in SubstepPacket._fields))
            for key, part in columns.substeps.items()
        }
        return cls(substeps, *(getattr(columns, name) for name in cls._fields[1:]))


@timed(TRANSFER)
def join_rollouts(packets: Iterable[RolloutPacket], columns: RolloutColumns) -> None:
    """Join rollouts side by side.

    All rollouts end at the last tick. A shorter one starts later; no actor acts in its environments before.

    :param packets: Rollouts.
    :param columns: Columns to fill; their number of environments is that of all rollouts together.
    """
    packets = list(packets)
    columns.clear()
    n_ticks = max(len(packet.rewards) for packet in packets)
    columns.reserve(n_ticks)
    bounds = np.cumsum([0, *(packet.rewards.shape[1] for packet in packets)]).tolist()
    places = [slice(*ends) for ends in pairwise(bounds)]
    if any(packet.actor_rewards is not None for packet in packets):
        columns.actor_rewards = np.zeros_like(columns.rewards)
    if any(packet.actor_done is not None for packet in packets):
        columns.actor_done = np.zeros_like(columns.terminated)
    last_actor_ids: list[ActorID] = []
    for packet, envs in zip(packets, places, strict=True):
        first_tick = n_ticks - len(packet.rewards)
        for target, source in (
            (columns.rewards, packet.rewards),
            (columns.terminated, packet.terminated),
            (columns.truncated, packet.truncated),
            (columns.step_complete, packet.step_complete),
            (columns.constrained, packet.constrained),
            (columns.actor_rewards, packet.actor_rewards),
            (columns.actor_done, packet.actor_done),
        ):
            if target is not None and source is not None:
                target[:first_tick, envs] = 0
                target[first_tick:n_ticks, envs] = source
        for ends, own in (
            (columns.final_observations, packet.final_observations),
            (columns.terminal_observations, packet.terminal_observations),
        ):
            ends += [
                entry._replace(tick=first_tick + entry.tick, env_index=envs.start + entry.env_index) for entry in own
            ]
        last_actor_ids += packet.last_actor_ids
    sequence = packets[0].actor_sequence
    is_dense = sequence is not None and all(
        packet.actor_sequence == sequence and len(packet.rewards) == n_ticks for packet in packets
    )
    for key, substep in columns.substeps.items():
        parts = [
            packet.substeps[key]._replace(ticks=packet.substeps[key].ticks + n_ticks - len(packet.rewards))
            for packet in packets
        ]
        _join_substep(parts, places, substep)
    actors: list[ActorID | None] = [None] * n_ticks
    if is_dense and sequence is not None:
        actors = [sequence[tick % len(sequence)] for tick in range(n_ticks)]
    columns.finish(last_actor_ids, actors)


def _join_substep(parts: list[SubstepPacket], places: list[slice], substep: SubstepColumns) -> None:
    """Join one sub-step key; its rows are the ticks at which at least one environment was at this sub-step."""
    ticks = np.unique(np.concatenate([part.ticks for part in parts]))
    n_envs = places[-1].stop
    valid = np.zeros((len(ticks), n_envs), np.bool_)
    agent_ids = np.zeros((len(ticks), n_envs), np.int64)
    rows_of_parts = [np.searchsorted(ticks, part.ticks) for part in parts]
    for part, envs, rows in zip(parts, places, rows_of_parts, strict=True):
        valid[rows, envs] = True if part.valid is None else part.valid
        agent_ids[rows, envs] = part.agent_ids
    for row, tick in enumerate(ticks.tolist()):
        here = None if valid[row].all() else np.flatnonzero(valid[row]).tolist()
        substep.add_row(tick, here, agent_ids[row] if here is None else agent_ids[row, here])
    substep.finish(is_dense=False)
    for part, envs, rows in zip(parts, places, rows_of_parts, strict=True):
        for target, source in ((substep.actions, part.actions), (substep.logits or {}, part.logits or {})):
            for key, array in source.items():
                target[key][rows, envs] = array
        for key, array in part.observations.items():
            substep.observations[key][rows, envs] = array[:-1]
            substep.observations[key][len(ticks), envs] = array[-1]


class RolloutPlan(NamedTuple):
    """Parameters of a rollout of a group."""

    n_steps: int
    """Environment steps of each environment."""
    with_logits: bool
    keeps_terminal: bool
    """Whether to keep the last observations of terminated episodes."""
    begins: bool
    """Whether the rollout starts with a reset of the environments."""
    constrained: tuple[StatisticSource, ...] = ()
    """Statistics whose values are recorded."""


class Generators(NamedTuple):
    """State or seed of the random generators of a group's policy."""

    state: Any = None
    """State of the generators; `None`: use the seed."""
    seed: int | None = None
    """Seed of the generators; `None`: they continue."""

    def hand_to(self, policy: Any) -> None:
        """Set the random generators of a policy."""
        if self.state is not None:
            policy.set_rng_state(self.state)
        elif self.seed is not None:
            policy.seed(self.seed)


class EnvGroup:
    """Environments that are stepped together by one policy.

    :param env: The vector environment.
    :param name: Name of the group in messages.
    :param seeds: A seed for each environment; empty: they are seeded later.
    :param wrappers: Learned statistics of the wrappers of each environment; empty: none.
    """

    def __init__(
        self, env: StructuredVectorEnv, name: str, seeds: Sequence[Any] = (), wrappers: Sequence[Any] = ()
    ) -> None:
        self.env = env
        self._name = name
        self.generator = RolloutGenerator(env)
        self._columns: dict[tuple[int, bool], RolloutColumns] = {}
        self._episodes: list[LogStats] = []
        env.epoch_stats = EpisodeRelay(self._episodes.append)
        if seeds:
            env.seed(seeds)
        if any(wrappers):
            env.load_state_dict({"environments": [{"wrappers": learned, "problem": ""} for learned in wrappers]})

    def spaces(self) -> ActorSpaces:
        """Return the spaces of the environments."""
        return ActorSpaces.of(self.env)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the vector environment."""
        return getattr(self.env, method)(*arguments)

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def collect(self, policy: Policy, plan: RolloutPlan) -> RolloutPacket:
        """Collect and check a rollout; it is valid until the next one.

        :param policy: The policy.
        :param plan: Parameters of the rollout.
        """
        env, key = self.env, (plan.n_steps, plan.with_logits)
        env.keep_terminal_observations = plan.keeps_terminal
        if env.constrained != plan.constrained:
            env.record_constrained(plan.constrained)
            self._columns = {}
        if key not in self._columns:
            shapes = logits_shapes_of(policy, env.action_spaces_dict) if plan.with_logits else None
            self._columns = {key: RolloutColumns.for_env(env, plan.n_steps, shapes)}
        if plan.begins:
            self.generator.reset()
        columns = self._columns[key]
        try:
            self.generator.collect(policy, columns)
            columns.check(env.seeding_at)
        except (NonFiniteError, EnvironmentContractError) as error:
            raise type(error)(f"{self._name}, {error}") from error
        return RolloutPacket.of(columns)

    def play(self, policy: Policy, budget: np.ndarray, deterministic: bool) -> None:
        """Play `budget` episodes of each environment, `[n_envs]`; see :meth:`StructuredVectorEnv.play_episodes`."""
        self._episodes.clear()
        play_episodes(policy, self.env, budget.copy(), deterministic)

    def take_episodes(self) -> list[LogStats]:
        """Return the statistics of the episodes that ended since the last call."""
        episodes = self._episodes[:]
        self._episodes.clear()
        return episodes


class EpisodeRelay(LogStatsAggregator):
    """Take the place of a vector environment's epoch statistics and pass the statistics of each episode on.

    :param pass_on: Receives the statistics.
    """

    joins_samples = False

    def __init__(self, pass_on: Callable[[LogStats], None]) -> None:
        super().__init__(LogStatsLevel.EPOCH)
        self._pass_on = pass_on

    @override(LogStatsAggregator)
    def receive(self, stat: LogStats) -> None:
        self._pass_on(stat)

    @override(LogStatsAggregator)
    def receive_later(self, deliver: Callable[[], None]) -> None:
        deliver()

    @override(LogStatsAggregator)
    def receive_columns(
        self,
        columns: Mapping[LogStatsKey, np.ndarray | list[Any]],
        n_periods: int,
        occurrences: Mapping[LogStatsKey, np.ndarray] | None = None,
    ) -> None:
        for stat in split_columns(columns, n_periods, occurrences):
            self._pass_on(stat)


class Fragment(NamedTuple):
    """Rollout and statistics of a group, for the learner."""

    packet: RolloutPacket | None
    """`None`: episodes were played, without a rollout."""
    episodes: list[EncodedStats]
    wrappers: list[Any]
    """Learned statistics of the wrappers of each environment; empty: no wrapper learns."""
    generators: Any = None
    """State of the policy's generators afterwards, if the learner needs it."""


class RemoteGroup(EnvGroup):
    """A group of environments in an actor of a pool; each call passes the policy.

    :param make_env: Makes the vector environment from a factory and the number of environments.
    :param env_factory: Makes one environment.
    :param n_envs: Number of environments.
    :param arguments: Further arguments of :class:`EnvGroup`.
    """

    def __init__(self, make_env: MakeEnv, env_factory: Callable[[], Any], n_envs: int, *arguments: Any) -> None:
        super().__init__(make_env(env_factory, n_envs), *arguments)
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
            self._policy = unpublished(structure)
        policy, has_network = self._policy, weights is not None
        if has_network:
            unpack_weights(weights, policy.state_dict())
        if has_network or is_new:  # other policies continue with their own generators
            generators.hand_to(policy)
        packet: RolloutPacket | None = act(policy, *more)
        learned = [statistics_states(env) for env in getattr(self.env, "envs", ())]
        episodes = [encode_stats(stats) for stats in self.take_episodes()]
        state = policy.rng_state() if generators.state is not None else None
        return Fragment(packet, episodes, learned if any(learned) else [], state)


class RemoteGroups:
    """Groups of environments in the actors of a pool.

    :param pool: The actors; each of the first ones hosts a group.
    :param name: Name of these environments among all hosted objects.
    :param make_env: Makes the vector environment of an actor, in the actor.
    :param noun: Name of a group in messages.
    """

    def __init__(self, pool: TaskPool, name: str, make_env: MakeEnv, noun: str = "Group") -> None:
        self.pool, self._name, self._make_env, self._noun = pool, name, make_env, noun
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
            arguments = (env_factory, sizes[first], f"{self._noun} {index}", own, self.learned.get(index, []))
            return partial(RemoteGroup, self._make_env, *arguments)

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

    @timed(TRANSFER)
    def take(self, index: int, fragment: Fragment, statistics: LogStatsAggregator) -> RolloutPacket | None:
        """Return the rollout of a fragment after adding its episodes to the statistics of the epoch.

        :param index: Index of the group.
        :param fragment: The fragment.
        :param statistics: Statistics of the epoch.
        """
        for episode in fragment.episodes:
            statistics.receive(decode_stats(episode))
        if fragment.wrappers:
            self.learned[index] = fragment.wrappers
        return fragment.packet


class GroupedVectorEnv(DividedVectorEnv, ABC):
    """Environments in groups. A group collects whole rollouts and plays whole episodes; single steps are not possible.

    The first group draws from the generators of the policy. Each other group starts every rollout with a seed derived
    from their state before the rollout and the index of the group. Only the state of the policy has to be saved, and a
    call can be repeated with the same result. A policy that is not a `TorchPolicy` is copied once; its copies continue.

    :param sizes: Number of environments of each group.
    :param spaces: Spaces of the environments.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); `None`: they are not logged.
    """

    acts = True

    def __init__(self, sizes: Sequence[int], spaces: ActorSpaces, logging_prefix: str | None) -> None:
        super().__init__(group_slices(sizes), spaces, logging_prefix)
        self._seeds: list[Any] = [None] * self.n_envs

    @abstractmethod
    def _act(self, policy: Policy, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `collect` or `play` of each group with the policy and its :meth:`_generators`.

        :param policy: The policy; its generators are afterwards in the state of the first group's.
        :param method: Name of the method of :class:`EnvGroup`.
        :param arguments: Further arguments by group.
        """

    @override(DividedVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        self._seeds = list(seeds)
        super().seed(seeds)

    def _generators(self, policy: Policy) -> list[Generators]:
        """Return the generators of each group."""
        others = range(1, len(self.groups))
        if isinstance(policy, TorchPolicy):
            before = policy.rng_state()
            return [Generators(before), *(Generators(seed=seed_beside(before, index)) for index in others)]
        seeds = [[int(self._seeds[self.groups[index].start] or 0), index] for index in others]
        drawn = [int(np.random.SeedSequence(numbers).generate_state(1)[0]) for numbers in seeds]
        return [Generators(), *(Generators(seed=seed) for seed in drawn)]

    @override(StructuredVectorEnv)
    def roll_out(self, policy: Policy, columns: RolloutColumns, begins: bool) -> None:
        assert columns.n_steps is not None, "columns for vector environments know their number of steps"
        with_logits = any(substep.logits is not None for substep in columns.substeps.values())
        plan = RolloutPlan(columns.n_steps, with_logits, self.keep_terminal_observations, begins, self.constrained)
        join_rollouts(self._collect(policy, plan), columns)

    def _collect(self, policy: Policy, plan: RolloutPlan) -> Iterable[RolloutPacket]:
        """Return the rollouts of all groups, in their order."""
        return self._act(policy, "collect", [(plan,)] * len(self.groups))

    @override(StructuredVectorEnv)
    def play_episodes(self, policy: Policy, budget: np.ndarray, deterministic: bool) -> None:
        self._act(policy, "play", [(budget[group], deterministic) for group in self.groups])

    def _no_single_steps(self, *_: Any, **__: Any) -> NoReturn:
        raise EnvironmentContractError(
            f"{type(self).__name__}: environments in groups cannot be stepped one step at a time; expected a call of "
            "`roll_out` or `play_episodes`. Use runner.env_groups=1 with runner=dev or runner=local."
        )

    step = reset = actor_ids = is_actor_done = get_actor_rewards = get_env_time = _no_single_steps


class LocalGroups(GroupedVectorEnv):
    """Groups that collect one after another in the training process, with environments there or in worker processes.

    :param envs: Vector environment of each group.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); `None`: they are not logged.
    :param noun: Name of a group in messages.
    """

    def __init__(self, envs: Sequence[StructuredVectorEnv], logging_prefix: str | None, noun: str = "Group") -> None:
        super().__init__([env.n_envs for env in envs], ActorSpaces.of(envs[0]), logging_prefix)
        self.members = [EnvGroup(env, f"{noun} {index}") for index, env in enumerate(envs)]
        self._copies: list[Policy] = []

    @override(GroupedVectorEnv)
    def _act(self, policy: Policy, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if isinstance(policy, TorchPolicy):
            policies, generators = [policy] * len(self.groups), self._generators(policy)
        else:
            policies, generators = self._copies_of(policy), [Generators()] * len(self.groups)
        results, states = [], []
        for member, acting, of_group, rest in zip(self.members, policies, generators, arguments, strict=True):
            of_group.hand_to(acting)
            results.append(getattr(member, method)(acting, *rest))
            for episode in member.take_episodes():
                self.epoch_stats.receive(episode)
            if isinstance(acting, TorchPolicy):
                states.append(acting.rng_state())
        if isinstance(policy, TorchPolicy):
            policy.set_rng_state(states[0])
        return results

    def _copies_of(self, policy: Policy) -> list[Any]:
        """Return the copy of each group of a policy that is not a `TorchPolicy`."""
        if not self._copies or self._copies[0] is not policy:
            self._copies = [policy, *(copy.deepcopy(policy) for _ in self.groups[1:])]
            for of_group, generators in zip(self._copies, self._generators(policy), strict=True):
                generators.hand_to(of_group)
        return self._copies

    @override(DividedVectorEnv)
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [member.call(method, *of_group) for member, of_group in zip(self.members, arguments, strict=True)]

    @override(StructuredVectorEnv)
    def close(self) -> None:
        self._call_all("close")


def in_groups(
    n_groups: int, n_envs: int, logging_prefix: str | None, make: Callable[[int, str | None], StructuredVectorEnv]
) -> StructuredVectorEnv:
    """Make a vector environment, divided into groups if there are several.

    :param n_groups: Maximum number of groups.
    :param n_envs: Number of environments.
    :param logging_prefix: Prefix of the epoch statistics.
    :param make: Makes a vector environment of a number of environments and a logging prefix.
    """
    if n_groups <= 1 or n_envs == 1:
        return make(n_envs, logging_prefix)
    return LocalGroups([make(size, None) for size in group_sizes(n_envs, n_groups)], logging_prefix)


def group_sizes(n_envs: int, n_groups: int) -> list[int]:
    """Return the number of environments of each group, as even as possible.

    :param n_envs: Number of environments.
    :param n_groups: Maximum number of groups.
    """
    return [envs.stop - envs.start for envs in env_slices(n_envs, min(n_groups, n_envs))]


def group_slices(sizes: Sequence[int]) -> list[slice]:
    """Return the environments of each group among all.

    :param sizes: Number of environments of each group.
    """
    ends = np.cumsum(sizes).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def seed_of_start(seed: Any, n_starts: int) -> Any:
    """Return the seed for a restart, so that the episodes differ from those of earlier starts.

    :param seed: Seed of the first start.
    :param n_starts: Number of earlier starts.
    """
    if n_starts == 0 or seed is None:
        return seed
    return int(np.random.SeedSequence([int(seed), n_starts]).generate_state(1)[0])


def seed_beside(rng_state: Mapping[str, Any], *numbers: int) -> int:
    """Return a seed derived from the state of a policy's generators, without drawing from them.

    :param rng_state: State of the generators.
    :param numbers: Further numbers that the seed is derived from.
    """
    state = rng_state["numpy"]
    return int(np.random.SeedSequence([state["state"], state["inc"], *numbers]).generate_state(1, np.uint64)[0])
