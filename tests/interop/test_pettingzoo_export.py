from __future__ import annotations

import warnings

import numpy as np
import pytest

from maze.core.errors import ConfigError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.interop import to_aec, to_parallel
from maze.interop.pettingzoo_env import PettingZooEnv
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.interop.pettingzoo_envs import Duel, Survivors

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # PettingZoo's tests use what it calls deprecated
    from pettingzoo.test import api_test, parallel_api_test, seed_test

ENVS = {
    "one actor": lambda: GymMazeEnv("CartPole-v1"),
    "sub-steps": lambda: StructuredCuttingEnv(cutting_env_factory()),
    "agents, masks": lambda: PettingZooEnv(Duel()),
    "agents that leave": lambda: PettingZooEnv(Survivors()),
    "cut off": lambda: TimeLimitWrapper.wrap(PettingZooEnv(Duel(goal=50)), max_episode_steps=3),
    "plain actions": lambda: NoDictActionWrapper.wrap(PettingZooEnv(Duel())),
}


@pytest.fixture(autouse=True)
def _without_remarks():
    """PettingZoo's tests remark on what is allowed but unusual, such as dictionary spaces of actions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", [*ENVS, "agents that come and go"])
def test_pettingzoos_own_test_of_aec_environments_passes(name, capsys):
    make = ENVS.get(name, lambda: dispatching_env(n_vehicles=2, horizon=15, shift_length=6))
    api_test(to_aec(make()), num_cycles=40)


@pytest.mark.parametrize("name", ENVS)
def test_pettingzoos_own_test_of_parallel_environments_passes(name):
    parallel_api_test(to_parallel(ENVS[name]()), num_cycles=40)


@pytest.mark.parametrize("name", ["one actor", "agents, masks"])
def test_pettingzoos_own_test_of_seeds_passes(name, capsys):
    seed_test(lambda: to_aec(ENVS[name]()), num_cycles=20)


def test_per_agent_rewards_sum_to_the_rewards_of_the_environment():
    env = to_aec(PettingZooEnv(Duel()))
    env.reset(seed=0)
    returns = dict.fromkeys(env.possible_agents, 0.0)
    actions = iter([1, 1, 0])
    for agent in env.agent_iter():
        _, reward, terminated, truncated, _ = env.last()
        returns[agent] += reward
        env.step(None if terminated or truncated else next(actions))
    assert returns == {"player_0": 1.0, "player_1": -1.0}


def test_without_rewards_of_their_own_all_actors_earn_what_is_given():
    env = to_aec(StructuredCuttingEnv(cutting_env_factory()))
    env.reset(seed=1)
    assert env.possible_agents == ["step_0_0", "step_1_0"]
    for _ in range(2):
        env.step(env.action_space(env.agent_selection).sample())
    assert env.rewards["step_0_0"] == env.rewards["step_1_0"] != 0.0


def test_masks_have_the_form_that_pettingzoo_samples_with():
    env = to_aec(PettingZooEnv(Duel(goal=1)))
    env.reset(seed=0)
    assert env.infos["player_0"]["action_mask"].tolist() == [1, 0]
    space = env.action_space("player_0")
    assert {space.sample(env.infos["player_0"]["action_mask"]) for _ in range(20)} == {0}


def test_environments_with_varying_agents_have_no_parallel_form():
    with pytest.raises(ConfigError, match="variable number of agents"):
        to_parallel(dispatching_env())


def test_in_parallel_one_agent_acts_at_a_time_and_is_named():
    env = to_parallel(PettingZooEnv(Duel()))
    _, infos = env.reset(seed=0)
    assert [infos[agent]["acts"] for agent in env.agents] == [True, False]
    _, _, _, _, infos = env.step(dict.fromkeys(env.agents, 1))
    assert [infos[agent]["acts"] for agent in env.agents] == [False, True]
    assert env.aec_env.observe("player_1")["observation"].tolist() == [2.0]


def test_frames_are_rendered():
    env = to_aec(dispatching_env(n_vehicles=2), render_mode="rgb_array")
    env.reset(seed=0)
    frame = env.render()
    assert (frame.ndim, frame.dtype) == (3, np.uint8)
