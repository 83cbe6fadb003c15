"""CP-SAT's schedules: by hand, against published bounds, and dispatched."""

from __future__ import annotations

import importlib.util
import sys
import time

import numpy as np
import pytest

from maze.core.errors import ConfigError, ConfigImportError
from maze.core.rollout.solve import solve
from maze.maze_cli import main
from maze_envs.scheduling.cp_sat import CpSatPolicy, cp_sat_schedule, dispatched_makespan
from maze_envs.scheduling.job_shop import JobShopEnv
from maze_envs.scheduling.rules import DispatchingRule
from maze_envs.scheduling.taillard import Instance, instances_of, lower_bound

needs_ortools = pytest.mark.skipif(importlib.util.find_spec("ortools") is None, reason="needs maze-rl[ortools]")

# A job that is long on machine 0 can start at once; the short one before it needs one unit on machine 1 first, and then
# the whole time on machine 2. Whoever does not wait for it is late.
WAITING = Instance("waiting", np.array([[10, 1, 1], [1, 1, 20]]), np.array([[0, 1, 2], [1, 0, 2]]), 22)


def is_schedule(starts: np.ndarray, durations: np.ndarray, machines: np.ndarray) -> bool:
    """Whether jobs are in order, and no two operations of a machine overlap."""
    ends = starts + durations
    in_order = bool((starts[:, 1:] >= ends[:, :-1]).all())
    for machine in np.unique(machines):
        first = starts[machines == machine].argsort()
        in_order &= bool((starts[machines == machine][first][1:] >= ends[machines == machine][first][:-1]).all())
    return in_order


@needs_ortools
def test_the_shortest_schedule_by_hand_may_wait_and_dispatching_may_not():
    found = cp_sat_schedule(WAITING.durations, WAITING.machines, n_workers=1)
    assert is_schedule(found.starts, WAITING.durations, WAITING.machines)
    # the second job alone takes 1 + 1 + 20; the first one fits in after it has used machine 0 from 1 to 2, and ends
    # with a unit on machine 2 before or after those 20: 2 + 10 + 1 = 13 is too late for before, so 22 + 1
    assert (found.makespan, found.bound) == (23, 23)
    assert found.starts[1].tolist() == [0, 1, 2]
    # on the clock machine 0 does not wait from 0 to 1: the long operation starts, the other job has machine 0 from 10
    # to 11 and machine 2 from 11 to 31, and the last unit comes after it
    assert dispatched_makespan(WAITING, found.starts) == 32
    assert dispatched_makespan(WAITING, found.starts, may_wait=True) == 23
    assert cp_sat_schedule(WAITING.durations, WAITING.machines, n_workers=1, may_wait=False)[:2] == (32, 32)


@needs_ortools
@pytest.mark.parametrize("name", ["ta01", "ta31"])
def test_values_lie_between_the_published_bounds(name):
    (one,) = instances_of([name])
    found = cp_sat_schedule(one.durations, one.machines, seconds=0.5, n_workers=1)
    assert is_schedule(found.starts, one.durations, one.machines)
    assert found.bound <= one.best_known <= found.makespan
    assert found.makespan >= int(lower_bound(one.durations, one.machines))
    assert found.makespan == (found.starts + one.durations).max()


@needs_ortools
@pytest.mark.parametrize("may_wait", [False, True])
def test_the_policy_dispatches_the_schedule_of_each_shop(may_wait):
    env = JobShopEnv(n_jobs=[3, 5], n_machines=[2, 4], only_choices=True, may_wait=may_wait)
    policy = CpSatPolicy(1.0, n_workers=1)
    env.seed(4)
    for _ in range(3):
        seen, done = env.reset(), False
        state = env.get_maze_state()
        jobs, machines = state["size"].tolist()
        shop = Instance("", state["durations"][:jobs, :machines], state["machines"][:jobs, :machines], 1)
        while not done:
            seen, _, done, _ = env.step(policy.compute_action(seen, env.get_maze_state()))
        found = cp_sat_schedule(shop.durations, shop.machines, seconds=0.5, n_workers=1)
        assert found.makespan == found.bound <= env.get_maze_state()["job_ready"].max()
        expected = found.makespan if may_wait else dispatched_makespan(shop, found.starts)
        assert env.get_maze_state()["job_ready"].max() == expected


@needs_ortools
def test_the_command_rolls_the_policy_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main(
        [
            *("env=job_shop", "env.n_jobs=3", "env.n_machines=3", "policy=job_shop_cp_sat", "policy.n_workers=1"),
            *("runner=sequential", "runner.n_episodes=1"),
        ]
    )
    assert "gap_to_bound" in capsys.readouterr().out


def test_missing_parts_are_reported(monkeypatch):
    monkeypatch.setitem(sys.modules, "ortools.sat.python.cp_model", None)
    with pytest.raises(ConfigImportError, match=r'pip install "maze-rl\[ortools\]>=1"'):
        cp_sat_schedule(WAITING.durations, WAITING.machines)


@needs_ortools
@needs_ortools
def test_a_search_ends_when_its_time_is_over():
    (one,) = instances_of(["ta21"])
    begin, until = time.monotonic(), time.monotonic() + 1.0
    found = cp_sat_schedule(one.durations, one.machines, 60.0, 1, is_time_over=lambda: time.monotonic() > until)
    assert time.monotonic() - begin < 20.0
    assert found.makespan > found.bound


@needs_ortools
def test_with_a_zero_time_limit_the_schedule_is_that_of_a_heuristic():
    instances = instances_of(["ta01"])
    found = cp_sat_schedule(instances[0].durations, instances[0].machines, seconds=1e-3, n_workers=1)
    assert found.makespan <= solve(DispatchingRule("MWKR"), JobShopEnv, instances)[0].kpis["makespan"]
    assert found.bound >= int(lower_bound(instances[0].durations, instances[0].machines))


@needs_ortools
def test_a_time_limit_is_checked():
    with pytest.raises(ConfigError, match="expected a time limit above 0 for CP-SAT, found 0"):
        cp_sat_schedule(WAITING.durations, WAITING.machines, seconds=0)
