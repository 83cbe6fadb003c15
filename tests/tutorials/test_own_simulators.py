"""The simulators of users that `improve` is tried on: rules worked out by hand, copies, and planning."""

from __future__ import annotations

import numpy as np
import pytest

from maze.core.agent.policy import acting_in
from maze.planning.rollout_policy import RolloutPolicy
from maze.utils.check_env import check_env
from tutorial_maze_env.ambulances import HOMES, STATIONS, AmbulancesEnv, HomeStation
from tutorial_maze_env.truck_docks import DOCKS, NO_TRUCK, PERIODS, LongestWait, TruckDocksEnv

PROBLEMS = [(TruckDocksEnv, LongestWait), (AmbulancesEnv, HomeStation)]


@pytest.mark.parametrize("make", [TruckDocksEnv, AmbulancesEnv])
def test_the_environments_are_sound(make):
    assert check_env(make, n_steps=150).findings == []


def test_a_truck_waits_docks_and_leaves():
    env = TruckDocksEnv()
    env.seed(1)
    env.reset()
    core = env.core_env
    core.kinds[:], core.waited[:] = [-1, 1, -1, 0, -1, -1], [0, 3, 0, 1, 0, 0]  # chilled and dry
    core.free_in[:] = [2, 0, 0, 1]
    core._arrivals = lambda: 1  # one truck that finds no place, whatever happens
    assert LongestWait().compute_action(observation := _observed(env), actor_id=env.actor_id()) == {"truck": 1}
    assert observation["truck_mask"].tolist() == [False, True, False, True, False, False, True]
    observation, reward, _, _ = env.step({"truck": 1})
    assert (reward, observation["dock_mask"].tolist()) == (0.0, [False, False, True, False])
    _, reward, _, _ = env.step({"dock": 2})
    assert reward == pytest.approx(-0.05 - 2.0)  # the dry truck waits for a period, one is turned away
    assert core.free_in.tolist() == [1, 0, 4, 0]
    assert core.kinds.tolist() == [-1, -1, -1, 0, -1, -1]
    assert env.step({"truck": NO_TRUCK})[1] == pytest.approx(-0.05 - 2.0)
    assert core.waited[3] == 3


def test_a_day_of_the_docks_has_96_periods():
    env, done = TruckDocksEnv(), False
    env.seed(1)
    observation, act = env.reset(), acting_in(env, LongestWait(), deterministic=True)
    while not done:
        observation, _, done, _ = env.step(act(observation, env.actor_id()))
        assert np.all(env.core_env.free_in >= 0)
        assert len(env.core_env.free_in) == DOCKS
    assert env.get_env_time() == PERIODS


def test_the_nearest_ambulance_answers_and_late_calls_cost():
    env = AmbulancesEnv()
    env.seed(1)
    env.reset()
    core = env.core_env
    core.now, core.queue = 100.0, [(100.0, (2.0, 5.5), 30.0)]
    core.at, core.there_at = [STATIONS[home] for home in HOMES], [0.0] * len(HOMES)
    core.is_busy = [False] * len(HOMES)
    minutes = [core._minutes(unit, (2.0, 5.5)) for unit in range(len(HOMES))]
    assert np.argmin(minutes) == 3  # at (2, 8): 2.5 km at 0.7 km a minute
    assert minutes[3] == pytest.approx(2.5 / 0.7)
    core.there_at[3] = 110.0  # still on its way
    assert core._minutes(3, (2.0, 5.5)) == pytest.approx(10 + 2.5 / 0.7)
    core.n_late = 0
    core._answer(3)
    assert (core.n_late, core.is_busy[3]) == (1, True)
    assert core.there_at[3] == pytest.approx(110 + 2.5 / 0.7 + 30)


@pytest.mark.parametrize(("make", "heuristic"), PROBLEMS)
def test_rollouts_of_the_heuristics_earn_more(make, heuristic):
    returns = []
    for policy in (heuristic(), RolloutPolicy(heuristic(), horizon=12, scenarios=8)):
        env, total, done = make(), 0.0, False
        env.seed(5)
        policy.seed(5)
        observation = env.reset()
        while not done:
            action = policy.compute_action(observation, None, env, env.actor_id(), deterministic=True)
            observation, reward, done, _ = env.step(action)
            total += reward
        returns.append(total)
    assert returns[1] > returns[0]


def _observed(env):
    return env.observation_conversion.maze_to_space(env.get_maze_state())
