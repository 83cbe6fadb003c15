"""Environments that are stepped by turns to fill a replay buffer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
    BaseDistributedWorkersWithBuffer,
)
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.structured_vector_env import StructuredVectorEnv
from maze.train.trainers.common.replay_buffer.column_rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import fixed_actors


@dataclass
class _Group:
    """Environments whose actors act together."""

    generator: RolloutGenerator
    columns: RolloutColumns
    rows: RolloutRows

    @property
    def env(self) -> StructuredVectorEnv:
        env: StructuredVectorEnv = self.generator.env
        return env


class DummyDistributedWorkersWithBuffer(BaseDistributedWorkersWithBuffer):
    """Steps the environments by turns; the learner waits for them.

    As many of them as take turns together act with one pass through the network, in this process, and are stepped
    together, perhaps elsewhere. What is collected does not depend on where that is.

    :param args: See the base class.
    :param make_env: Makes environments that are stepped together, of a factory and their number; ``None``: in this
        process.
    """

    _groups: list[_Group]

    @override(BaseDistributedWorkersWithBuffer)
    def __init__(
        self,
        *args: Any,
        make_env: Callable[[Callable[[], Any], int], StructuredVectorEnv] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._make_env = make_env or (lambda env_factory, n_envs: SequentialVectorEnv([env_factory] * n_envs))
        self._groups = []
        self._turn = 0
        self._actors: list[ActorID] = []

    @override(BaseDistributedWorkersWithBuffer)
    def start(self) -> None:
        if self._groups:
            return
        size = math.gcd(self.n_workers, self.rollouts_per_iteration)
        for first in range(0, self.n_workers, size):
            self._groups.append(self._make_group(size, self.env_instance_seeds[first : first + size]))

    @override(BaseDistributedWorkersWithBuffer)
    def stop(self) -> None:
        for group in self._groups:
            group.env.close()
        self._groups.clear()

    @override(BaseDistributedWorkersWithBuffer)
    def broadcast_updated_policy(self, state_dict: dict[str, Any]) -> None:
        self.worker_policy.load_state_dict(state_dict)

    @override(BaseDistributedWorkersWithBuffer)
    def collect_rollouts(self) -> tuple[float, float, float]:
        self.start()
        n_collected = 0
        while n_collected < self.rollouts_per_iteration:
            group = self._groups[self._turn]
            self._turn = (self._turn + 1) % len(self._groups)
            group.generator.collect(self.worker_policy, group.columns)
            group.columns.check_finite(group.env.seeding_at)
            self.replay_buffer.add_rows(group.rows.convert(group.columns, self.replay_buffer.n_rows_added))
            n_collected += group.columns.n_envs
        return 0.0, 0.0, 0.0

    @property
    @override(BaseDistributedWorkersWithBuffer)
    def actors(self) -> list[ActorID]:
        self.start()
        return self._actors

    @override(BaseDistributedWorkersWithBuffer)
    def wrapper_statistics(self) -> list[Any]:
        states = [state for group in self._groups for state in group.env.wrapper_statistics()]
        return states if any(states) else []

    @override(BaseDistributedWorkersWithBuffer)
    def load_wrapper_statistics(self, states: Sequence[Any]) -> None:
        self.start()
        for index, group in enumerate(self._groups):
            n_envs = group.env.n_envs
            group.env.load_wrapper_statistics(list(states[index * n_envs : (index + 1) * n_envs]))

    @override(BaseDistributedWorkersWithBuffer)
    def episodes_state(self, with_running: bool = True) -> dict[str, Any]:
        groups = [{"environments": group.env.episodes_state(), "rows": group.rows.state()} for group in self._groups]
        return {"turn": self._turn, "groups": groups}

    @override(BaseDistributedWorkersWithBuffer)
    def load_episodes_state(self, state: Mapping[str, Any]) -> dict[int, str]:
        self.start()
        for group in self._groups:
            group.generator.reset()
            group.rows.reset()
        groups = state.get("groups", [])
        sizes = [len(group["environments"]) for group in groups]
        if sizes != [group.env.n_envs for group in self._groups]:
            reason = f"the training stepped {sum(sizes)} environments in {len(sizes)} groups, now it is different"
            return dict.fromkeys(range(self.n_workers), reason)
        self._turn = state["turn"]
        problems: dict[int, str] = {}
        first = 0
        for group, stored in zip(self._groups, groups, strict=True):
            of_group = group.env.load_episodes_state(stored["environments"])
            group.rows.load_state(stored["rows"], of_group, not self.replay_buffer.lacks_rows)
            problems.update({first + index: problem for index, problem in of_group.items()})
            first += group.env.n_envs
        return problems

    def _make_group(self, n_envs: int, seeds: Sequence[int]) -> _Group:
        env = self._make_env(self.env_factory, n_envs)
        env.epoch_stats = self.epoch_stats
        env.seed(list(seeds))
        generator = RolloutGenerator(env)
        self._actors = fixed_actors(env.agent_counts_dict)
        spaces = (env.observation_spaces_dict, env.action_spaces_dict)
        item_length = 1 if self.split_rollouts_into_transitions else self.n_rollout_steps
        self.replay_buffer.allocate(self._actors, *spaces, item_length)
        rows = RolloutRows(self._actors, *spaces, n_envs, item_length)
        return _Group(generator, generator.allocate(self.n_rollout_steps), rows)
