"""Environments in groups, each of which acts by itself: what a rollout is then depends on the grouping alone, and not
on where the groups are."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.errors import EnvironmentContractError, NonFiniteError
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator, LogStatsKey, LogStatsLevel
from maze.core.rollout.batched_acting import logits_shapes_of, play_episodes
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.distributed_actors.rollout_packet import ActorSpaces, RolloutPacket, join_rollouts
from maze.train.parallelization.vector_env.shared_arrays import env_slices
from maze.train.parallelization.vector_env.structured_vector_env import (
    StructuredVectorEnv,
    checked_seeds,
    joint_state,
    load_joint_state,
)

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy
    from maze.core.env.structured_env import ActorID


class RolloutPlan(NamedTuple):
    """What a group is asked to collect."""

    n_steps: int
    """Environment steps of each environment."""
    with_logits: bool
    keeps_terminal: bool
    """Whether the last observations of terminated episodes are wanted."""
    begins: bool
    """Whether it begins with a reset of the environments."""


class EnvGroup:
    """Environments that are stepped together by a policy, wherever they are.

    :param env: The vector environment.
    :param index: Which group it is.
    """

    def __init__(self, env: StructuredVectorEnv, index: int) -> None:
        self.env = env
        self._index = index
        self._generator = RolloutGenerator(env)
        self._columns: dict[tuple[int, bool], RolloutColumns] = {}

    def collect(self, policy: Policy, plan: RolloutPlan) -> RolloutPacket:
        """Collects a rollout; it is valid until the next one.

        :param policy: Acts as it is.
        :param plan: What is collected.
        """
        env, key = self.env, (plan.n_steps, plan.with_logits)
        env.keep_terminal_observations = plan.keeps_terminal
        if key not in self._columns:
            shapes = logits_shapes_of(policy, env.action_spaces_dict) if plan.with_logits else None
            self._columns = {key: RolloutColumns.for_env(env, plan.n_steps, shapes)}
        if plan.begins:
            self._generator.reset()
        columns = self._columns[key]
        try:
            self._generator.collect(policy, columns)
            columns.check_finite(env.seeding_at)
        except (NonFiniteError, EnvironmentContractError) as error:
            raise type(error)(f"Group {self._index}, {error}") from error
        return RolloutPacket.of(columns)


class EpisodeRelay(LogStatsAggregator):
    """Passes the statistics of episodes on at once, in the place of a vector environment's own epoch statistics.

    :param pass_on: Takes them.
    """

    def __init__(self, pass_on: Callable[[LogStats], None]) -> None:
        super().__init__(LogStatsLevel.EPOCH)
        self._pass_on = pass_on

    @override(LogStatsAggregator)
    def receive(self, stat: LogStats) -> None:
        self._pass_on(stat)

    @override(LogStatsAggregator)
    def receive_all(self, stats: Sequence[LogStats]) -> None:
        for stat in stats:
            self._pass_on(stat)

    @override(LogStatsAggregator)
    def receive_later(self, deliver: Callable[[], None]) -> None:
        deliver()

    @override(LogStatsAggregator)
    def receive_columns(self, columns: Mapping[LogStatsKey, list[Any]], n_periods: int) -> None:
        for period in range(n_periods):
            self._pass_on({key: values[period] for key, values in columns.items()})


class GroupedVectorEnv(StructuredVectorEnv, ABC):
    """Environments in groups that act by themselves, rollout by rollout and episode by episode.

    The first group draws from the policy's own generators; each other one begins every rollout with a seed that depends
    on their state before it and on the group. So nothing but the policy's state has to be saved, and it makes no
    difference where a group is, or whether it has to be asked twice. Other policies are copied once, and go on.

    :param sizes: Number of environments of each group.
    :param spaces: Their spaces.
    :param logging_prefix: Where epoch statistics are logged (`train`, `eval`); `None`: nowhere.
    """

    acts = True

    def __init__(self, sizes: Sequence[int], spaces: ActorSpaces, logging_prefix: str | None) -> None:
        super().__init__(
            sum(sizes),
            spaces.action_spaces_dict,
            spaces.observation_spaces_dict,
            spaces.agent_counts_dict,
            logging_prefix,
        )
        ends = np.cumsum(sizes).tolist()
        self.groups = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self._seeds: list[Any] = [None] * self.n_envs

    @override(StructuredVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        self._seeds = checked_seeds(seeds, self.n_envs)

    def _seed_of_copy(self, index: int) -> int:
        """Seed of a further group's copy of a policy that is no network's: it goes on by itself."""
        seed = self._seeds[self.groups[index].start]
        return int(np.random.SeedSequence([int(seed or 0), index]).generate_state(1)[0])

    @override(StructuredVectorEnv)
    def roll_out(self, policy: Policy, columns: RolloutColumns, begins: bool) -> None:
        assert columns.n_steps is not None, "columns for vector environments know their number of steps"
        with_logits = any(substep.logits is not None for substep in columns.substeps.values())
        plan = RolloutPlan(columns.n_steps, with_logits, self.keep_terminal_observations, begins)
        join_rollouts(self._collect(policy, plan), columns)

    @abstractmethod
    def _collect(self, policy: Policy, plan: RolloutPlan) -> Iterable[RolloutPacket]:
        """The rollouts of all groups, in their order."""

    @abstractmethod
    @override(StructuredVectorEnv)
    def play_episodes(self, policy: Policy, quota: np.ndarray, deterministic: bool) -> None: ...

    @override(StructuredVectorEnv)
    def step(self, actions: Any, out: Any = None) -> NoReturn:
        raise self._no_single_steps()

    @override(StructuredVectorEnv)
    def reset(self, out: Any = None) -> NoReturn:
        raise self._no_single_steps()

    def _no_single_steps(self) -> EnvironmentContractError:
        return EnvironmentContractError(
            f"{type(self).__name__}: environments in groups act by themselves; expected `roll_out` or `play_episodes`, "
            "found one. Use runner.env_groups=1 with runner=dev or runner=local."
        )

    @override(StructuredVectorEnv)
    def actor_ids(self) -> list[ActorID]:
        raise self._no_single_steps()

    @override(StructuredVectorEnv)
    def is_actor_done(self) -> np.ndarray:  # type: ignore[override]
        raise self._no_single_steps()

    @override(StructuredVectorEnv)
    def get_actor_rewards(self) -> np.ndarray | None:
        raise self._no_single_steps()

    @override(StructuredVectorEnv)
    def get_env_time(self) -> np.ndarray:  # type: ignore[override]
        raise self._no_single_steps()


class LocalGroups(GroupedVectorEnv):
    """Groups that take turns in the process of the training, stepped there or in worker processes.

    :param envs: The groups.
    :param logging_prefix: Where epoch statistics are logged (`train`, `eval`); `None`: nowhere.
    """

    def __init__(self, envs: Sequence[StructuredVectorEnv], logging_prefix: str | None) -> None:
        super().__init__([env.n_envs for env in envs], ActorSpaces.of(envs[0]), logging_prefix)
        self._members = [EnvGroup(env, index) for index, env in enumerate(envs)]
        self._envs = list(envs)
        self._copies: list[Policy] = []
        for env in envs:
            env.epoch_stats = EpisodeRelay(self._count)

    def _count(self, stats: LogStats) -> None:
        self.epoch_stats.receive(stats)  # it may have been replaced meanwhile

    @override(GroupedVectorEnv)
    def _collect(self, policy: Policy, plan: RolloutPlan) -> Iterable[RolloutPacket]:
        return self._by_turns(policy, lambda index, acting: self._members[index].collect(acting, plan))

    @override(GroupedVectorEnv)
    def play_episodes(self, policy: Policy, quota: np.ndarray, deterministic: bool) -> None:
        def play(index: int, acting: Policy) -> None:
            play_episodes(acting, self._envs[index], quota[self.groups[index]].copy(), deterministic)

        self._by_turns(policy, play)

    def _by_turns(self, policy: Policy, act: Callable[[int, Policy], Any]) -> list[Any]:
        if not isinstance(policy, TorchPolicy):
            return [act(index, of_group) for index, of_group in enumerate(self._copies_of(policy))]
        before = policy.rng_state()
        results, after = [], before
        for index in range(len(self.groups)):
            if index:
                policy.seed(seed_beside(before, index))
            results.append(act(index, policy))
            after = after if index else policy.rng_state()
        policy.set_rng_state(after)
        return results

    def _copies_of(self, policy: Policy) -> list[Policy]:
        """The policy of each group, where it is of somebody's own kind."""
        if not self._copies or self._copies[0] is not policy:
            self._copies = [policy, *(copy.deepcopy(policy) for _ in self.groups[1:])]
            for index, of_group in enumerate(self._copies[1:], 1):
                of_group.seed(self._seed_of_copy(index))
        return self._copies

    @override(GroupedVectorEnv)
    def seed(self, seeds: Sequence[Any]) -> None:
        super().seed(seeds)
        for env, group in zip(self._envs, self.groups, strict=True):
            env.seed(self._seeds[group])

    @override(StructuredVectorEnv)
    def state_dict(self, with_running: bool = True) -> dict[str, Any]:
        return joint_state(self._envs, with_running)

    @override(StructuredVectorEnv)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        return load_joint_state(self._envs, state_dict)

    @override(StructuredVectorEnv)
    def close(self) -> None:
        for env in self._envs:
            env.close()


def in_groups(
    n_groups: int, n_envs: int, logging_prefix: str | None, make: Callable[[int, str | None], StructuredVectorEnv]
) -> StructuredVectorEnv:
    """Environments in this process or in worker processes, in groups if there are to be several.

    :param n_groups: Number of groups, at most.
    :param n_envs: Number of environments.
    :param logging_prefix: Where epoch statistics are logged.
    :param make: Makes so many environments that are logged there.
    """
    if n_groups <= 1 or n_envs == 1:
        return make(n_envs, logging_prefix)
    return LocalGroups([make(size, None) for size in group_sizes(n_envs, n_groups)], logging_prefix)


def group_sizes(n_envs: int, n_groups: int) -> list[int]:
    """Number of environments of each group, as even as possible.

    :param n_envs: Number of environments.
    :param n_groups: Number of groups, at most.
    """
    return [envs.stop - envs.start for envs in env_slices(n_envs, min(n_groups, n_envs))]


def seed_beside(rng_state: Mapping[str, Any], *numbers: int) -> int:
    """A seed that depends on a policy's generators, without drawing from them.

    :param rng_state: State of the generators.
    :param numbers: What else it depends on.
    """
    state = rng_state["numpy"]
    return int(np.random.SeedSequence([state["state"], state["inc"], *numbers]).generate_state(1, np.uint64)[0])
