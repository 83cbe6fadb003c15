"""Groups of environments, each with a policy of its own, and rollouts of the groups that finish first.

Rollouts of all groups depend on the number of groups, not on the execution backend: groups in this process, in worker
processes and in actors of Ray collect the same. Rollouts of the groups that finish first depend on timing.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch

from maze.core.agent.policy import Policy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator
from maze.core.rollout.batched_acting import logits_shapes_of, play_episodes
from maze.core.rollout.rollout_columns import RolloutColumns, SubstepColumns
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.update_profile import TRANSFER, timed
from maze.core.utils.worker_pool import LocalPool, Task, TaskPool, env_slices, unpublished
from maze.core.wrappers.return_normalization_reward_wrapper import statistics_states
from maze.train.parallelization.vector_env import vector_env_utils
from maze.train.parallelization.vector_env.structured_vector_env import DividedVectorEnv, StructuredVectorEnv

if TYPE_CHECKING:
    from maze.core.env.structured_env import ActorID
    from maze.train.trainers.common.model_selection.model_selection_base import StatisticSource

logger = logging.getLogger(__name__)

_BY_TICK = "rewards", "terminated", "truncated", "step_complete", "constrained", "actor_rewards", "actor_done"

MakeEnv = Callable[..., StructuredVectorEnv]
"""Makes a vector environment from a factory, the number of environments, and optionally a logging prefix."""


@timed(TRANSFER)
def join_rollouts(rollouts: Sequence[RolloutColumns], columns: RolloutColumns) -> None:
    """Join rollouts side by side.

    All rollouts end at the last tick. A shorter one starts later; no actor acts in its environments before.

    :param rollouts: Rollouts, or copies of them from other processes.
    :param columns: Columns to fill; their number of environments is that of all rollouts together.
    """
    columns.clear()
    n_ticks = max(rollout.n_ticks for rollout in rollouts)
    columns.reserve(n_ticks)
    if any(rollout.actor_rewards is not None for rollout in rollouts):
        columns.actor_rewards = np.zeros_like(columns.rewards)
    if any(rollout.actor_done is not None for rollout in rollouts):
        columns.actor_done = np.zeros_like(columns.terminated)
    last_actor_ids: list[ActorID] = []
    first_ticks, places = [], []
    for rollout in rollouts:
        envs = slice(len(last_actor_ids), len(last_actor_ids) + rollout.n_envs)
        first_tick = n_ticks - rollout.n_ticks
        for name in _BY_TICK:
            target, source = getattr(columns, name), getattr(rollout, name)
            if target is not None and source is not None:
                target[:first_tick, envs] = 0
                target[first_tick:n_ticks, envs] = source
        for name in ("final_observations", "terminal_observations"):
            for entry in getattr(rollout, name):
                moved = entry._replace(tick=first_tick + entry.tick, env_index=envs.start + entry.env_index)
                getattr(columns, name).append(moved)
        columns.renewed += [envs.start + index for index in rollout.renewed]
        last_actor_ids += rollout.last_actor_ids
        first_ticks.append(first_tick)
        places.append(envs)
    for key, substep in columns.substeps.items():
        _join_substep([rollout.substeps[key] for rollout in rollouts], first_ticks, places, substep)
    sequence = rollouts[0].actor_sequence
    actors: list[ActorID | None] = [None] * n_ticks
    if sequence is not None and not any(first_ticks) and all(each.actor_sequence == sequence for each in rollouts):
        actors = [sequence[tick % len(sequence)] for tick in range(n_ticks)]
    columns.finish(last_actor_ids, actors)


def _join_substep(
    parts: Sequence[SubstepColumns], first_ticks: Sequence[int], places: Sequence[slice], substep: SubstepColumns
) -> None:
    """Join one sub-step key; its rows are the ticks at which at least one environment was at this sub-step."""
    ticks_of_parts = [part.ticks + first_tick for part, first_tick in zip(parts, first_ticks, strict=True)]
    ticks = np.unique(np.concatenate(ticks_of_parts))
    n_envs = places[-1].stop
    valid = np.zeros((len(ticks), n_envs), np.bool_)
    agent_ids = np.zeros((len(ticks), n_envs), np.int64)
    every = slice(0, len(ticks))  # faster than indices
    rows_of_parts = [every if len(own) == len(ticks) else ticks.searchsorted(own) for own in ticks_of_parts]
    for part, envs, rows in zip(parts, places, rows_of_parts, strict=True):
        valid[rows, envs] = True if part.valid is None else part.valid
        agent_ids[rows, envs] = part.agent_ids
    is_complete = np.all(valid, axis=1).tolist()
    for row, tick in enumerate(ticks.tolist()):
        here = None if is_complete[row] else np.flatnonzero(valid[row]).tolist()
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
    continues: bool = False
    """Whether only the generators of a new policy are seeded, and those of the same policy continue."""


class EnvGroup:
    """Environments that are stepped together by one policy, in an actor of a pool; each call passes the policy.

    :param make_env: Makes the vector environment from a factory and the number of environments.
    :param env_factory: Makes one environment.
    :param n_envs: Number of environments.
    :param name: Name of the group in messages.
    :param seeds: A seed for each environment; empty: they are seeded later.
    :param wrappers: Learned statistics of the wrappers of each environment; empty: none.
    :param is_replacement: Whether the group replaces one that was lost.
    """

    def __init__(
        self,
        make_env: MakeEnv,
        env_factory: Callable[[], Any],
        n_envs: int,
        name: str,
        seeds: Sequence[Any] = (),
        wrappers: Sequence[Any] = (),
        is_replacement: bool = False,
    ) -> None:
        env = self.env = make_env(env_factory, n_envs)
        self._name = name
        self._generator = RolloutGenerator(env)
        self._columns: dict[tuple[int, bool], RolloutColumns] = {}
        self._episodes: list[LogStats] = []
        self._token = -1
        self._is_replacement = is_replacement
        env.epoch_stats = vector_env_utils.EpisodeRelay(self._episodes.append)
        if seeds:
            env.seed(seeds)
        if any(wrappers):
            env.load_state_dict({"environments": [{"wrappers": learned, "problem": ""} for learned in wrappers]})

    def spaces(self) -> vector_env_utils.ActorSpaces:
        """Return the spaces of the environments."""
        return vector_env_utils.ActorSpaces.of(self.env)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the vector environment."""
        return getattr(self.env, method)(*arguments)

    def begin_next(self) -> None:
        """Let the next rollout start with a reset, which keeps restored states."""
        self._generator.reset()

    def close(self) -> None:
        """Close the environments."""
        self.env.close()

    def collect(self, token: int, structure: Any, weights: Any, generators: Generators, plan: RolloutPlan) -> Fragment:
        """Collect and check a rollout; it is valid until the next one. See :meth:`_acting` for the policy.

        :param token: Number of the policy.
        :param structure: The policy, as published by the pool.
        :param weights: Its weights, uint8 `[n_bytes]`; `None`: unchanged.
        :param generators: Its random generators.
        :param plan: Parameters of the rollout.
        :raises NonFiniteError: A value of the rollout is NaN or infinite.
        :raises EnvironmentContractError: An environment breaks its contract.
        """
        policy, env, key = self._acting(token, structure, weights, generators), self.env, plan[:2]
        env.keep_terminal_observations = plan.keeps_terminal
        if env.constrained != plan.constrained:
            env.record_constrained(plan.constrained)
            self._columns = {}
        if key not in self._columns:
            shapes = logits_shapes_of(policy, env.action_spaces_dict) if plan.with_logits else None
            self._columns = {key: RolloutColumns.for_env(env, plan.n_steps, shapes)}
        if plan.begins:
            self._generator.reset()
        columns = self._columns[key]
        try:
            self._generator.collect(policy, columns)
            columns.renewed, self._is_replacement = list(range(columns.n_envs)) if self._is_replacement else [], False
            columns.check_finite(env.seeding_at, env.constrained)
        except (NonFiniteError, EnvironmentContractError) as error:
            raise type(error)(f"{self._name}, {error}") from error
        return self._fragment(columns, policy, generators)

    def play(
        self, token: int, structure: Any, weights: Any, generators: Generators, budget: np.ndarray, deterministic: bool
    ) -> Fragment:
        """Play `budget` episodes of each environment, see :meth:`StructuredVectorEnv.play_episodes`.

        The arguments without a description are those of :meth:`collect`.

        :param budget: Number of episodes of each environment, `[n_envs]`.
        :param deterministic: Whether to take the most probable actions.
        """
        policy = self._acting(token, structure, weights, generators)
        self._episodes.clear()
        play_episodes(policy, self.env, budget.copy(), deterministic)
        return self._fragment(None, policy, generators)

    def _acting(self, token: int, structure: Any, weights: Any, generators: Generators) -> Any:
        """Return the policy that acts.

        :param token: Number of the policy.
        :param structure: The policy, as published by the pool.
        :param weights: Its weights, uint8 `[n_bytes]`; `None`: those that it has.
        :param generators: Its random generators.
        """
        is_new, self._token = token != self._token, token
        if is_new:
            self._policy = unpublished(structure)
            if self._policy is structure and not isinstance(structure, TorchPolicy):
                self._policy = copy.deepcopy(structure)
            self._bytes = [] if weights is None else bytes_of(self._policy.state_dict())
        if weights is not None:
            unpack_weights(weights, self._bytes)
        if generators.state is not None:
            self._policy.set_rng_state(generators.state)
        elif generators.seed is not None and (is_new or not generators.continues):
            self._policy.seed(generators.seed)
        return self._policy

    def _fragment(self, rollout: RolloutColumns | None, policy: Any, generators: Generators) -> Fragment:
        learned = [statistics_states(env) for env in getattr(self.env, "envs", ())]
        episodes: list[LogStats] = [vector_env_utils.PortableStats(episode) for episode in self._episodes]
        self._episodes.clear()
        state = policy.rng_state() if generators.state is not None else None
        return Fragment(rollout, episodes, learned if any(learned) else [], state)


class Fragment(NamedTuple):
    """Rollout and statistics of a group, for the learner."""

    rollout: RolloutColumns | None
    """`None`: episodes were played, without a rollout."""
    episodes: list[LogStats]
    wrappers: list[Any]
    """Learned statistics of the wrappers of each environment; empty: no wrapper learns."""
    generators: Any = None
    """State of the policy's generators afterwards, if the learner needs it."""


class EnvGroups:
    """Groups of environments in the actors of a pool.

    :param pool: The actors; each of the first ones hosts a group.
    :param name: Name of these environments among all hosted objects.
    :param make_env: Makes the vector environment of an actor, in the actor.
    :param noun: Name of a group in messages.
    """

    def __init__(self, pool: TaskPool, name: str, make_env: MakeEnv, noun: str = "Group") -> None:
        self.pool, self._name, self._make_env, self._noun = pool, name, make_env, noun
        self._policy: Any = None
        self._token = 0
        self.learned: dict[int, list[Any]] = {}
        """Group -> statistics that the wrappers of its environments have learned."""

    def open(
        self, env_factory: Callable[[], Any], groups: Sequence[slice], seeds: Callable[[], list[Any]], may_join: bool
    ) -> vector_env_utils.ActorSpaces:
        """Make the environments and wait for them.

        :param env_factory: Makes one environment.
        :param groups: Environments of each group among all.
        :param seeds: Returns the current seed of each environment; empty: they are seeded later. Restarted actors and
            actors that join get seeds derived from these.
        :param may_join: Whether actors that join get a group as well.
        :return: The spaces that all environments have in common.
        """

        def maker(index: int, n_starts: int) -> Callable[[], EnvGroup]:
            nth, first = divmod(index, len(groups))
            own, n_envs = groups[first], groups[first].stop - groups[first].start
            own_seeds = [seed_of_start(seed_of_start(seed, n_starts), nth) for seed in seeds()[own]]
            name, learned = f"{self._noun} {index}", self.learned.get(index, [])
            return partial(EnvGroup, self._make_env, env_factory, n_envs, name, own_seeds, learned, n_starts > 0)

        self.pool.host(self._name, maker, None if may_join else len(groups))
        spaces: list[vector_env_utils.ActorSpaces] = self.call("spaces", [()] * len(groups))
        for group, of_group in zip(groups, spaces, strict=True):
            vector_env_utils.check_same_spaces(spaces[0], of_group, f"environment {group.start}")
        return spaces[0]

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of all groups in parallel; see :class:`EnvGroup`.

        :param method: Name of the method.
        :param arguments: Arguments of each group.
        :return: Results in the order of the groups.
        """
        return self.pool.call(self._name, method, arguments)

    def submit(self, index: int, method: str, *arguments: Any) -> Task:
        """Submit a call of a method of one group."""
        return self.pool.submit(index, self._name, method, *arguments)

    @timed(TRANSFER)
    def hand_over(self, policy: Any) -> tuple[int, Any, Any]:
        """Store a policy for all actors: its structure once, its weights in each call.

        :return: The first arguments of :meth:`EnvGroup.collect` and :meth:`EnvGroup.play`. Groups in this process use
            the policy itself.
        """
        is_copied = isinstance(policy, TorchPolicy) and not isinstance(self.pool, LocalPool)
        if policy is not self._policy:
            self._structure = self.pool.publish(copied_to_cpu(policy) if is_copied else policy)
            self._policy, self._token = policy, self._token + 1
        weights = self.pool.put(packed_weights(policy.state_dict())) if is_copied else None
        return self._token, self._structure, weights

    @timed(TRANSFER)
    def take(self, index: int, fragment: Fragment, statistics: LogStatsAggregator) -> Any:
        """Return the rollout of a fragment after adding its episodes to the statistics of the epoch.

        :param index: Index of the group.
        :param fragment: The fragment.
        :param statistics: Statistics of the epoch.
        """
        for episode in fragment.episodes:
            statistics.receive(episode)
        if fragment.wrappers:
            self.learned[index] = fragment.wrappers
        return fragment.rollout


class GroupedVectorEnv(DividedVectorEnv):
    """Environments in groups. A group collects whole rollouts and plays whole episodes; single steps are not possible.

    The first group draws from the generators of the policy. Each other group starts every rollout with a seed derived
    from their state before the rollout and the index of the group. Only the state of the policy has to be saved, and a
    call can be repeated with the same result. A policy that is not a `TorchPolicy` is copied once; its copies continue.

    :param actors: The groups in the actors of a pool.
    :param env_factory: Makes one environment.
    :param groups: Environments of each group among all.
    :param logging_prefix: Prefix of the epoch statistics (`train`, `eval`); `None`: they are not logged.
    """

    acts = True
    may_join = False
    """Whether actors that join get a group as well."""

    def __init__(
        self, actors: EnvGroups, env_factory: Callable[[], Any], groups: Sequence[slice], logging_prefix: str | None
    ) -> None:
        self._actors = actors
        self._seeds: list[Any] = []
        spaces = actors.open(env_factory, groups, lambda: self._seeds, self.may_join)
        super().__init__(groups, spaces, logging_prefix)

    @override(DividedVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        self._seeds = list(seeds)
        super().seed(seeds)

    def _act(self, policy: Policy, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call `collect` or `play` of each group and return the rollouts.

        :param policy: The policy; its generators are afterwards in the state of the first group's.
        :param method: Name of the method of :class:`EnvGroup`.
        :param arguments: Further arguments by group.
        """
        copies, drawn = self._actors.hand_over(policy), self._generators(policy)
        all_arguments = [(*copies, of_group, *more) for of_group, more in zip(drawn, arguments, strict=True)]
        fragments: list[Fragment] = self._actors.call(method, all_arguments)
        if isinstance(policy, TorchPolicy):
            policy.set_rng_state(fragments[0].generators)
        return [self._actors.take(index, fragment, self.epoch_stats) for index, fragment in enumerate(fragments)]

    def _generators(self, policy: Policy) -> list[Generators]:
        """Return the generators of each group."""
        others = range(1, len(self.groups))
        if isinstance(policy, TorchPolicy):
            before = policy.rng_state()
            return [Generators(before), *(Generators(seed=seed_beside(before, index)) for index in others)]
        firsts = [self._seeds[group.start] if self._seeds else 0 for group in self.groups]
        seeds = [np.random.SeedSequence([int(firsts[index] or 0), index]).generate_state(1) for index in others]
        return [Generators(), *(Generators(seed=int(seed[0]), continues=True) for seed in seeds)]

    @override(DividedVectorEnv)
    def _call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._actors.call("call", [(method, *of_group) for of_group in arguments])

    @override(StructuredVectorEnv)
    def roll_out(self, policy: Policy, columns: RolloutColumns, begins: bool) -> None:
        assert columns.n_steps is not None, "columns for vector environments know their number of steps"
        with_logits = any(substep.logits is not None for substep in columns.substeps.values())
        plan = RolloutPlan(columns.n_steps, with_logits, self.keep_terminal_observations, begins, self.constrained)
        join_rollouts(self._collect(policy, plan), columns)

    def _collect(self, policy: Policy, plan: RolloutPlan) -> list[RolloutColumns]:
        """Return the rollouts of all groups, in their order."""
        return self._act(policy, "collect", [(plan,)] * len(self.groups))

    @override(StructuredVectorEnv)
    def play_episodes(self, policy: Policy, budget: np.ndarray, deterministic: bool) -> None:
        self._act(policy, "play", [(budget[group], deterministic) for group in self.groups])

    @override(StructuredVectorEnv)
    def close(self) -> None:
        self._actors.pool.close()

    def _no_single_steps(self, *_: Any, **__: Any) -> NoReturn:
        raise EnvironmentContractError(
            f"{type(self).__name__}: environments in groups cannot be stepped one step at a time; expected a call of "
            "`roll_out` or `play_episodes`. Use runner.env_groups=1 with runner=dev or runner=local."
        )

    _advance = _begin = actor_ids = is_actor_done = get_actor_rewards = get_env_time = _no_single_steps


class FirstFragments(GroupedVectorEnv):
    """Environments in worker processes or actors of Ray; each steps one group with a copy of the policy.

    :param wait_for: Share of the groups in a rollout. Below 1, the first fragments are taken; late groups continue and
        deliver to a later rollout, and actors that join get their own groups.
    :param max_age: Maximum age of a fragment in rollouts; older fragments are dropped. Infinite: none is dropped, and
        each group begins its next fragment as soon as one is taken, for learning from a replay buffer.
    :param is_shared: Whether the actors belong to other environments, too, so that :meth:`close` does not end them.
    :raises ConfigError: The groups differ in size, although a rollout does not wait for all of them.
    """

    def __init__(
        self,
        actors: EnvGroups,
        env_factory: Callable[[], Any],
        groups: Sequence[slice],
        logging_prefix: str | None,
        wait_for: float = 1.0,
        max_age: float = 1,
        is_shared: bool = False,
    ) -> None:
        self._pool, self._is_shared = actors.pool, is_shared
        self._n_wanted, self.max_age = math.ceil(wait_for * len(groups) - 1e-9), max_age
        is_first, n_envs = self._n_wanted < len(groups), groups[-1].stop
        if is_first and n_envs % len(groups):
            raise ConfigError(
                f"runner.placement.wait_for: below 1, all groups need the same number of environments; found {n_envs} "
                f"environments in {len(groups)} groups. Set runner.concurrency (SAC, DQN: algorithm.num_actors) to a "
                "multiple of the number of groups."
            )
        # Fragments in progress, with the number of their rollout.
        self._under_way: dict[Task, int] = {}
        self._n_rollouts = self._n_starts = 0
        self._ages: list[int] = []
        self.may_join = is_first and len(groups) == self._pool.n_first
        super().__init__(actors, env_factory, groups, logging_prefix)

    @override(GroupedVectorEnv)
    def _collect(self, policy: Policy, plan: RolloutPlan) -> list[RolloutColumns]:
        if self.n_rollout_envs < self.n_envs:
            return [rollout for _, rollout in self.collect_first(policy, plan, self._n_wanted, self._n_wanted)]
        n_restarts = self._pool.n_restarts
        self._n_rollouts += 1
        rollouts = super()._collect(policy, plan)
        if self._pool.n_restarts > n_restarts:
            logger.warning("An actor was lost: from this rollout on, results differ from those of a run without loss.")
        return rollouts

    def collect_first(
        self, policy: Policy, plan: RolloutPlan, n_awaited: int, n_most: int
    ) -> list[tuple[int, RolloutColumns]]:
        """Return the fragments that finish first, including late fragments of earlier rollouts.

        :param policy: The policy; a group uses its weights until it begins its next fragment.
        :param plan: Parameters of the fragments; with `begins`, those in progress are discarded.
        :param n_awaited: Number of fragments to wait for.
        :param n_most: Maximum number of fragments; further ones that are complete belong to the next rollout.
        :return: Index of the group and fragment, in the order of arrival; those of a group in their order.
        """
        assert isinstance(policy, TorchPolicy), "only a TorchPolicy has the logits that late fragments need"
        self._n_rollouts += 1
        if plan.begins:
            self._under_way.clear()
        state, copies = policy.rng_state(), self._actors.hand_over(policy)
        self._pool.join_new()
        n_groups = self._pool.n_actors if self.may_join else len(self.groups)
        policy.seed(seed_beside(state, n_groups))
        all_at_once = self.max_age == math.inf

        def begin(index: int, plan: RolloutPlan) -> None:
            generators = Generators(seed=seed_beside(state, index, len(self._ages)))
            self._under_way[self._actors.submit(index, "collect", *copies, generators, plan)] = self._n_rollouts

        for index in set(range(n_groups)) - {task.actor for task in self._under_way}:
            begin(index, plan)
        taken: list[tuple[int, RolloutColumns]] = []
        while (n_missing := n_awaited - len(taken)) > 0:
            # a late group starts its next fragment at once, so wait for a single fragment while there are late ones
            is_late = all_at_once or min(self._under_way.values()) < self._n_rollouts
            finished = self._pool.finished(list(self._under_way), 1 if is_late else n_missing)
            for task in finished[: n_most - len(taken)]:
                self._ages.append(self._n_rollouts - self._under_way.pop(task))
                rollout = self._actors.take(task.actor, task.result, self.epoch_stats)
                if self._ages[-1] <= self.max_age:
                    taken.append((task.actor, rollout))
                if self._ages[-1] or all_at_once:
                    begin(task.actor, plan._replace(begins=False))
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
                events.fragments_dropped(value=int(age > self.max_age))
            self._ages.clear()

    @override(GroupedVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        if self.n_rollout_envs == self.n_envs and not self._under_way:
            return super().state_dict(with_running)
        states = asynchronous_states(self._actors.learned, self.n_envs)
        return {"n_starts": self._n_starts + 1, "environments": states}

    @override(GroupedVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        # with the seeds of the first start, its first episodes would come again
        if n_starts := state_dict.get("n_starts", int(self.n_rollout_envs < self.n_envs)):
            self._n_starts = n_starts
            self.seed([seed_of_start(seed, n_starts) for seed in self._seeds])
        return super().load_state_dict(state_dict)

    @override(GroupedVectorEnv)
    def close(self) -> None:
        if not self._is_shared:
            super().close()


def in_groups(
    n_groups: int, env_factory: Callable[[], Any], n_envs: int, logging_prefix: str | None, make_env: MakeEnv
) -> StructuredVectorEnv:
    """Make a vector environment, divided into groups if there are several, which collect one after another.

    :param n_groups: Maximum number of groups.
    :param env_factory: Makes one environment.
    :param n_envs: Number of environments.
    :param logging_prefix: Prefix of the epoch statistics.
    :param make_env: Makes a vector environment from the factory, the number of environments and a logging prefix.
    """
    if n_groups <= 1 or n_envs == 1:
        return make_env(env_factory, n_envs, logging_prefix)
    groups = env_slices(n_envs, n_groups)
    actors = EnvGroups(LocalPool(len(groups)), "environments", make_env)
    return GroupedVectorEnv(actors, env_factory, groups, logging_prefix)


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


def asynchronous_states(learned: Mapping[int, list[Any]], n_envs: int) -> list[dict[str, Any]]:
    """Return states of environments whose steps depend on timing: only the statistics of their wrappers.

    :param learned: Group -> statistics of the wrappers of each of its environments.
    :param n_envs: Number of environments.
    """
    problem = "it was stepped by an asynchronous actor, which ran ahead of the learner"
    known = [states for group in sorted(learned) for states in learned[group]] or [[]]
    return [{"problem": problem, "wrappers": known[index % len(known)]} for index in range(n_envs)]


def tensors_of(state_dict: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors of a nested state dictionary, in its order, each in its own shape `[...]`."""
    for value in state_dict.values():
        if isinstance(value, Mapping):
            yield from tensors_of(value)
        else:
            yield value


def copied_to_cpu(policy: TorchPolicy) -> TorchPolicy:
    """Return a copy of a policy on the CPU that acts in evaluation mode."""
    portable = copy.deepcopy(policy)
    portable.to("cpu")
    portable.eval()
    return portable


def bytes_of(state_dict: Mapping[Any, Any]) -> list[np.ndarray]:
    """Return the memory of all tensors, which are on the CPU, uint8 `[n_bytes]` each; they become contiguous."""
    tensors = list(tensors_of(state_dict))
    for tensor in tensors:
        tensor.data = tensor.data.contiguous()
    return [tensor.detach().reshape(-1).view(torch.uint8).numpy() for tensor in tensors]


def packed_weights(state_dict: Mapping[Any, Any]) -> np.ndarray:
    """Return all weights as one flat array, uint8 `[n_bytes]`, the fastest form for transfers between machines."""
    rows = [
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors_of(state_dict)
    ]
    return np.concatenate(rows) if rows else np.zeros(0, np.uint8)


def unpack_weights(packed: np.ndarray, rows: Sequence[np.ndarray]) -> None:
    """Copy the result of :func:`packed_weights` into live tensors.

    :param packed: Weights, uint8 `[n_bytes]`; not modified.
    :param rows: Their memory, the result of :func:`bytes_of`.
    """
    offset = 0
    for row in rows:
        row[:] = packed[offset : offset + len(row)]
        offset += len(row)
