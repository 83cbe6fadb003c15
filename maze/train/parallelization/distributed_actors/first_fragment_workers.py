"""Workers that fill a replay buffer with the fragments that are complete, without waiting for slow environments."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from maze.core.annotations import override
from maze.train.parallelization.distributed_actors.base_distributed_workers_with_buffer import (
    BaseDistributedWorkersWithBuffer,
)
from maze.train.parallelization.distributed_actors.env_groups import RolloutPlan, asynchronous_states
from maze.train.parallelization.vector_env.replay_log import states_for


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
        self._env: Any = None
        self._plan = RolloutPlan(self.n_rollout_steps, with_logits=False, keeps_terminal=False, begins=True)

    @override(BaseDistributedWorkersWithBuffer)
    def start(self) -> None:
        if self._env is None:
            env = self._env = self._make_env(self.env_factory, self.n_workers, "train")
            env.max_age, env.may_join = math.inf, False
            sizes = [group.stop - group.start for group in env.groups]
            self._rows = self._prepared(env, self.env_instance_seeds, sizes)

    @override(BaseDistributedWorkersWithBuffer)
    def stop(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()

    @override(BaseDistributedWorkersWithBuffer)
    def collect_rollouts(self) -> tuple[float, float, float]:
        self.start()
        start, buffer = time.perf_counter(), self.replay_buffer
        n_most = math.ceil(self.rollouts_per_iteration * len(self._rows) / self.n_workers)
        n_awaited = math.ceil(self._wait_for * n_most - 1e-9)
        fragments = self._env.collect_first(self.worker_policy, self._plan, n_awaited, n_most)
        self._plan = self._plan._replace(begins=False)
        for group, columns in fragments:
            buffer.add_rows(self._rows[group].convert(columns, buffer.n_rows_added))
        self.n_env_steps = sum(int(columns.step_complete.sum()) for _, columns in fragments)
        return 0.0, 0.0, time.perf_counter() - start

    @override(BaseDistributedWorkersWithBuffer)
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **self._env.state_dict()}

    @override(BaseDistributedWorkersWithBuffer)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> dict[int, str]:
        """Restore the statistics of wrappers; all environments begin new episodes."""
        self.start()
        super().load_state_dict({**state_dict, "is_ahead": False})
        self._plan = self._plan._replace(begins=True)
        for rows in self._rows:
            rows.load_state([])
        learned = [state["wrappers"] for state in states_for(state_dict, self.n_workers)]
        states = asynchronous_states({0: learned}, self.n_workers)
        problems: dict[int, str] = self._env.load_state_dict({"n_starts": 1, **state_dict, "environments": states})
        return problems

    @override(BaseDistributedWorkersWithBuffer)
    def write_epoch_stats(self) -> None:
        if self._env is not None:
            self._env.report_work()
        super().write_epoch_stats()
