"""Workers that fill a replay buffer, driven by the training process.

Environments are stepped in groups: in turn, or without waiting for slow ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

from maze.core.annotations import override
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.utils.worker_pool import env_slices
from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
    BaseDistributedWorkersWithBuffer,
)
from maze.train.parallelization.distributed_actors.env_groups import RolloutPlan, asynchronous_states
from maze.train.parallelization.vector_env import structured_vector_env
from maze.train.parallelization.vector_env.sequential_vector_env import in_sequence
from maze.train.trainers.common.replay_buffer.rows import RolloutRows
from maze.train.trainers.common.replay_buffer.transitions import TransitionRows
from maze.train.utils.run_process import in_thread

# Seconds to wait for rollouts in progress before their environments are closed.
_CLOSE_SECONDS = 1.0


@dataclass
class _Group:
    """Environments that are stepped together."""

    env: structured_vector_env.StructuredVectorEnv
    generator: RolloutGenerator
    columns: RolloutColumns
    rows: RolloutRows


@dataclass(eq=False)
class DummyDistributedWorkersWithBuffer(BaseDistributedWorkersWithBuffer):
    """Collect rollouts by turns of groups of environments. The learner waits for them or starts them in advance.

    Rollouts in advance do not depend on timing: they are added to the buffer by the next collection only, and the
    policy does not change while they are collected.

    The environments of a group are stepped together with one forward pass, with any execution backend. The collected
    rollouts do not depend on the backend.

    :param args: See the base class.
    :param make_env: Makes the vector environment of a group from a factory and the number of environments.
    """

    make_env: Callable[[Callable[[], Any], int], structured_vector_env.StructuredVectorEnv] = field(
        default=in_sequence, kw_only=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._groups: list[_Group] = []
        self._collecting: Future[list[TransitionRows]] | None = None
        self._turn = 0

    @override(BaseDistributedWorkersWithBuffer)
    def start(self) -> None:
        if self._groups:
            return
        size = math.gcd(self.n_workers, self.rollouts_per_iteration)
        for first in range(0, self.n_workers, size):
            env = self.make_env(self.env_factory, size)
            (rows,) = self._prepared(env, self.env_instance_seeds[first : first + size], [size])
            generator = RolloutGenerator(env)
            self._groups.append(_Group(env, generator, generator.allocate(self.n_rollout_steps), rows))

    @override(BaseDistributedWorkersWithBuffer)
    def stop(self) -> None:
        if self._collecting is not None:
            wait([self._collecting], _CLOSE_SECONDS)
            self._collecting, self.is_ahead = None, False
        super().stop()
        self._groups.clear()

    @override(BaseDistributedWorkersWithBuffer)
    def collect_rollouts(self) -> tuple[float, float, float]:
        if not self.is_ahead:
            self._add(self._collected())
            return 0.0, 0.0, 0.0
        start = time.perf_counter()
        self.finish_rollouts()
        self.is_ahead = False
        return 0.0, 0.0, time.perf_counter() - start

    @override(BaseDistributedWorkersWithBuffer)
    def begin_rollouts(self) -> None:
        if not self.is_ahead:
            self.start()
            self._collecting, self.is_ahead = in_thread(self._collected), True

    @override(BaseDistributedWorkersWithBuffer)
    def finish_rollouts(self) -> None:
        if self._collecting is not None:
            self._add(self._collecting.result())
            self._collecting = None

    def _collected(self) -> list[TransitionRows]:
        self.start()
        collected: list[TransitionRows] = []
        n_rollouts, number = 0, self.replay_buffer.n_rows_added
        while n_rollouts < self.rollouts_per_iteration:
            group = self._groups[self._turn]
            self._turn = (self._turn + 1) % len(self._groups)
            group.generator.collect(self.worker_policy, group.columns)
            group.columns.check_finite(group.env.seeding_at)
            collected.append(group.rows.convert(group.columns, number))
            number += len(collected[-1])
            n_rollouts += group.columns.n_envs
        return collected

    def _add(self, collected: list[TransitionRows]) -> None:
        for rows in collected:
            self.replay_buffer.add_rows(rows)

    @override(BaseDistributedWorkersWithBuffer)
    def state_dict(self) -> dict[str, Any]:
        self.finish_rollouts()
        rows = [row for group in self._groups for row in group.rows.state()]
        environments = structured_vector_env.joint_state(group.env.state_dict() for group in self._groups)
        return {**super().state_dict(), "turn": self._turn, "n_groups": len(self._groups), "rows": rows, **environments}

    @override(BaseDistributedWorkersWithBuffer)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        super().load_state_dict(state_dict)
        self.start()
        states = structured_vector_env.states_for(state_dict, self.n_workers)
        if state_dict.get("n_groups") != len(self._groups):
            reason = "the interrupted run stepped the environments in other groups"
            states = [structured_vector_env.begun_anew(state, state.get("problem", reason)) for state in states]
        else:
            self._turn = state_dict["turn"]
        slices = env_slices(self.n_workers, len(self._groups))
        problems = structured_vector_env.load_joint_state(
            slices,
            {"environments": states},
            lambda states: [
                group.generator.load_state_dict(state) for group, state in zip(self._groups, states, strict=True)
            ],
        )
        rows = state_dict.get("rows", [])
        for group, envs in zip(self._groups, slices, strict=True):
            new_episodes = [index - envs.start for index in problems if envs.start <= index < envs.stop]
            group.rows.load_state(rows[envs], new_episodes, with_numbers=not self.replay_buffer.lacks_rows)
        return problems


class FirstFragmentWorkers(BaseDistributedWorkersWithBuffer):
    """Add fragments to the buffer in the order of their arrival; groups of environments do not wait for each other.

    A collection takes the fragments that are complete, at most `rollouts_per_iteration` rollouts, and waits for a share
    of these. A group begins its next fragment when one is taken, with the weights of that moment, also while the
    learner learns. Each fragment is added once, those of an environment in their order.

    :param args: See the base class.
    :param wait_for: Share of the rollouts of a collection that is awaited.
    :param make_env: Makes the environments from a factory, their number and a logging prefix.
    """

    @override(BaseDistributedWorkersWithBuffer)
    def __init__(self, *args: Any, wait_for: float, make_env: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wait_for, self._make_env = wait_for, make_env
        self._plan = RolloutPlan(self.n_rollout_steps, with_logits=False, keeps_terminal=False, begins=True)

    @override(BaseDistributedWorkersWithBuffer)
    def start(self) -> None:
        if not self._envs:
            env = self._make_env(self.env_factory, self.n_workers, "train")
            env.max_age, env.may_join = math.inf, False
            sizes = [group.stop - group.start for group in env.groups]
            self._rows = self._prepared(env, self.env_instance_seeds, sizes)

    @override(BaseDistributedWorkersWithBuffer)
    def collect_rollouts(self) -> tuple[float, float, float]:
        self.start()
        start, buffer = time.perf_counter(), self.replay_buffer
        n_most = math.ceil(self.rollouts_per_iteration * len(self._rows) / self.n_workers)
        n_awaited = math.ceil(self._wait_for * n_most - 1e-9)
        fragments = self._envs[0].collect_first(self.worker_policy, self._plan, n_awaited, n_most)
        self._plan = self._plan._replace(begins=False)
        for group, columns in fragments:
            buffer.add_rows(self._rows[group].convert(columns, buffer.n_rows_added))
        self.n_env_steps = sum(int(columns.step_complete.sum()) for _, columns in fragments)
        return 0.0, 0.0, time.perf_counter() - start

    @override(BaseDistributedWorkersWithBuffer)
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._envs[0].state_dict()}

    @override(BaseDistributedWorkersWithBuffer)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Restore the statistics of wrappers; all environments begin new episodes."""
        self.start()
        super().load_state_dict({**state_dict, "is_ahead": False})
        self._plan = self._plan._replace(begins=True)
        for rows in self._rows:
            rows.load_state([])
        learned = [state["wrappers"] for state in structured_vector_env.states_for(state_dict, self.n_workers)]
        states = asynchronous_states({0: learned}, self.n_workers)
        problems: dict[int, str] = self._envs[0].load_state_dict({"n_starts": 1, **state_dict, "environments": states})
        return problems
