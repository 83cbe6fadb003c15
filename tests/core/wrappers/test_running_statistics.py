"""Rewards normalized by returns, and the life of the statistics: learned, frozen, saved, restored."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from maze.core.errors import CheckpointError, ConfigError
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.return_normalization_reward_wrapper import (
    FrozenEnvFactory,
    ReturnNormalizationRewardWrapper,
    load_statistics_states,
    statistics_states,
)
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.core.wrappers.test_small_wrappers import CountingEnv

ACTION = {"action": 0}


def wrapped(env=None, gamma=0.5, epsilon=0.0):
    env = GymMazeEnv(CountingEnv()) if env is None else env
    return ReturnNormalizationRewardWrapper.wrap(env, gamma=gamma, epsilon=epsilon)


def make_counting():
    return wrapped(TimeLimitWrapper.wrap(GymMazeEnv(CountingEnv()), max_episode_steps=4))


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    env = wrapped()
    env.reset()
    # rewards 1, 2, 3; returns 1, 2.5, 4.25; deviations -, 0.75, 1.32812...
    rewards = [env.step(ACTION)[1] for _ in range(3)]
    assert rewards == pytest.approx([1.0, 2.0 / 0.75, 3.0 / np.std([1.0, 2.5, 4.25])])


@pytest.mark.parametrize("length", [2, 10**6], ids=["terminated", "truncated"])
def test_the_discounted_return_restarts_with_each_episode(length):
    env = TimeLimitWrapper.wrap(wrapped(GymMazeEnv(CountingEnv(length))), max_episode_steps=2)
    for _ in range(2):
        env.reset()
        env.step(ACTION)
        assert env.step(ACTION)[2]
    assert env.statistics_state()["mean"] == pytest.approx(np.mean([1.0, 2.5, 1.0, 2.5]))
    assert env.std == pytest.approx(0.75)


def test_return_of_an_episode_ended_by_a_reset_does_not_continue():
    env = wrapped()
    env.reset()
    env.step(ACTION)
    env.reset()
    env.step(ACTION)
    assert env.statistics_state()["mean"] == 1.0


def test_sub_steps_belong_to_one_time():
    env = wrapped(TimeLimitWrapper.wrap(StructuredCuttingEnv(cutting_env_factory()), max_episode_steps=3), gamma=1.0)
    env.reset()
    for _ in range(3):
        env.step({"piece_idx": 0})
        env.step({"cut_rotation": 0})
    assert env.statistics_state()["count"] == 3


def test_frozen_statistics_are_used_and_not_learned():
    env = wrapped()
    env.reset()
    for _ in range(3):
        env.step(ACTION)
    env.freeze_statistics()
    std, state = env.std, env.statistics_state()
    assert env.step(ACTION)[1] == 4.0 / std
    assert env.statistics_state() == state


def test_an_evaluation_environment_passes_rewards_on():
    env = FrozenEnvFactory(make_counting)()
    env.reset()
    assert [env.step(ACTION)[1] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_rollouts_do_not_learn_statistics():
    config = {"_target_": "maze.core.wrappers.maze_gym_env_wrapper.make_gym_maze_env", "name": "CartPole-v1"}
    wrappers = {"ReturnNormalizationRewardWrapper": {"gamma": 0.9, "epsilon": 1e-8}}
    policy = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}
    env, _ = RolloutRunner.init_env_and_agent(config, wrappers, 10, policy)
    env.reset()
    assert [env.step(ACTION)[1] for _ in range(3)] == [1.0, 1.0, 1.0]


def test_a_reward_that_is_not_finite_is_passed_on_and_spoils_nothing():
    class Broken(gymnasium.Env):
        observation_space = spaces.Box(0, 1, (1,))
        action_space = spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), float("nan"), False, False, {}

    env = wrapped(GymMazeEnv(Broken()))
    env.reset()
    assert np.isnan(env.step(ACTION)[1])
    assert env.std == 1.0


@pytest.mark.parametrize("arguments", [{"gamma": 1.5}, {"epsilon": -1.0}])
def test_settings_out_of_range_are_refused(arguments):
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        wrapped(**arguments)


def learned(env):
    return [state["wrappers"] for state in env.state_dict()["environments"]]


@pytest.mark.parametrize("make_vector_env", [SequentialVectorEnv, SubprocVectorEnv])
def test_statistics_are_taken_from_vector_environments_and_given_back(make_vector_env):
    env, other = make_vector_env([make_counting] * 2), SequentialVectorEnv([make_counting] * 3)
    try:
        env.reset()
        for _ in range(3):
            env.step({"action": np.zeros(2, np.int64)})
        states = learned(env)
        assert [state[0]["count"] for state in states] == [3, 3]
        other.load_state_dict(env.state_dict())
        assert learned(other) == [*states, states[0]]
        env.load_state_dict({"environments": other.state_dict()["environments"][:2]})
        assert learned(env) == states
    finally:
        env.close()


def test_environments_without_statistics_have_none_to_save():
    env = SequentialVectorEnv([lambda: GymMazeEnv(CountingEnv())])
    assert learned(env) == [[]]
    env.load_state_dict(env.state_dict())
    of_others = [{"problem": "another environment", "wrappers": [{"count": 1, "mean": 0.0, "squares": 0.0}]}]
    with pytest.raises(CheckpointError, match="statistics of 1 wrappers"):
        env.load_state_dict({"environments": of_others})


def test_statistics_survive_the_way_through_a_state():
    env, other = make_counting(), make_counting()
    env.reset()
    for _ in range(3):
        env.step(ACTION)
    load_statistics_states(other, statistics_states(env))
    assert other.std == env.std
