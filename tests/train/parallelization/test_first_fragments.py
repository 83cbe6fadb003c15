"""Rollouts that do not wait for all actors, in virtual time: gain in throughput."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from maze.core.utils.worker_pool import Task, env_slices
from maze.train.parallelization.distributed_actors.env_groups import FirstFragments, Fragment, RolloutPlan
from maze.train.parallelization.vector_env.vector_env_utils import ActorSpaces
from tests.train.parallelization.toy_policies import ENVS, make_policy

EMPTY: Any = object()
PLAN = RolloutPlan(50, with_logits=True, keeps_terminal=False, begins=False)


class VirtualPool:
    """Actors whose fragments take lognormal steps of virtual time; records their calls."""

    def __init__(self, n_actors: int, n_steps: int, sigma: float) -> None:
        self.n_actors = self.n_first = n_actors
        self._n_steps, self._sigma = n_steps, sigma
        self._rng = np.random.default_rng(0)
        self._ends: list[tuple[float, int, Task]] = []
        self.slowness: dict[int, int] = {}
        self.now = 0.0
        self.n_restarts = 0
        self.begun: list[tuple[float, int]] = []
        self.ended: list[tuple[float, int]] = []

    def submit(self, actor: int, *_: Any) -> Task:
        task = Task(actor, "", "", (), result=Fragment(EMPTY, [], []))
        steps = self._rng.lognormal(-(self._sigma**2) / 2, self._sigma, self._n_steps) * self.slowness.get(actor, 1)
        heapq.heappush(self._ends, (self.now + steps.sum(), id(task), task))
        self.begun.append((self.now, actor))
        return task

    def finished(self, tasks: Sequence[Task], n_wanted: int = 1) -> list[Task]:
        assert len(tasks) == len(self._ends)
        done = []
        for _ in range(n_wanted):
            end, _, task = heapq.heappop(self._ends)
            self.now = max(self.now, end)
            self.ended.append((end, task.actor))
            done.append(task)
        return done

    def join_new(self) -> None: ...


class VirtualGroups:
    """Groups in virtual actors, with empty rollouts."""

    def __init__(self, pool: VirtualPool) -> None:
        self.pool, self.submit = pool, pool.submit

    def open(self, factory: Any, *_: Any) -> ActorSpaces:
        return ActorSpaces.of(factory())

    def hand_over(self, policy: Any) -> tuple[Any, ...]:
        return (0, None, None)

    def take(self, index: int, fragment: Fragment, statistics: Any) -> Any:
        return fragment.rollout


def collected(n_actors: int, wait_for: float, n_rollouts: int = 60, sigma: float = 1.0) -> tuple[VirtualPool, Any]:
    pool = VirtualPool(n_actors, PLAN.n_steps, sigma)
    groups: Any = VirtualGroups(pool)
    env = FirstFragments(groups, ENVS["flat"], env_slices(n_actors, n_actors), None, wait_for=wait_for)
    policy = make_policy(ENVS["flat"])
    for _ in range(n_rollouts):
        if wait_for == 1.0:  # the slowest is waited for
            pool.finished([pool.submit(actor) for actor in range(n_actors)], n_actors)
            continue
        taken: Any = env._collect(policy, PLAN)
        assert len(taken) == env.n_rollout_envs
    return pool, env


@pytest.mark.parametrize(("n_actors", "ratio"), [(10, 1.15), (16, 1.25), (32, 1.3)])
def test_the_first_nine_tenths_of_fragments_arrive_by_the_stated_factor_faster(n_actors: int, ratio: float) -> None:
    every, (first, env) = collected(n_actors, 1.0)[0], collected(n_actors, 0.9)
    assert env.n_rollout_envs / first.now > ratio * n_actors / every.now


def test_a_late_group_starts_the_next_fragment_when_it_delivers() -> None:
    pool, env = collected(16, 0.9)
    n_late = sum(age > 0 for age in env._ages)
    begun = set(pool.begun)
    assert n_late > 60
    assert sum(end in begun for end in pool.ended) >= n_late


def test_groups_that_fill_a_replay_buffer_never_wait_for_each_other() -> None:
    pool = VirtualPool(10, PLAN.n_steps, sigma=0.0)
    pool.slowness = {3: 20}
    groups: Any = VirtualGroups(pool)
    env = FirstFragments(groups, ENVS["flat"], env_slices(10, 10), None, wait_for=0.9, max_age=math.inf)
    policy = make_policy(ENVS["flat"])
    arrived = [index for _ in range(99) for index, _ in env.collect_first(policy, PLAN, 9, 10)]
    assert pool.now == 99 * PLAN.n_steps  # nothing but the steps of the fast environments takes time
    n_arrived = Counter(arrived)
    assert n_arrived.pop(3) == 4
    assert set(n_arrived.values()) == {98, 99}  # those of the slow one count among the nine of an update
    assert {(end, actor) for end, actor in pool.ended} <= set(pool.begun)  # each begins again when it delivers
    assert len(pool.begun) - len(pool.ended) == 10  # and all of them step while the learner learns


def test_fragments_above_the_maximum_are_taken_first_next_time() -> None:
    class Instant(VirtualPool):
        def finished(self, tasks: Sequence[Task], n_wanted: int = 1) -> list[Task]:
            return list(tasks)

    groups: Any = VirtualGroups(Instant(4, 1, 0.0))
    env = FirstFragments(groups, ENVS["flat"], env_slices(4, 4), None, wait_for=0.5, max_age=math.inf)
    policy = make_policy(ENVS["flat"])
    taken = [[index for index, _ in env.collect_first(policy, PLAN, 2, 3)] for _ in range(4)]
    assert taken == [[0, 1, 2], [3, 0, 1], [2, 3, 0], [1, 2, 3]]
