"""Rewards on the scale of returns, against numbers worked out by hand and gymnasium's rule."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.env.structured_env import ActorID
from maze.core.rollout.rollout_columns import RolloutColumns
from maze.train.trainers.common.observation_statistics import RewardScaling

OBSERVATIONS = {0: spaces.Dict({"observation": spaces.Box(-1.0, 1.0, (1,), np.float32)})}
ACTIONS = {0: spaces.Dict({"action": spaces.Discrete(2)})}


def rollout(rewards, terminated=(), truncated=(), complete=None):
    """Columns of rewards `[n_ticks, n_envs]`; ends are (tick, environment)."""
    rewards = np.array(rewards, np.float32)
    columns = RolloutColumns(OBSERVATIONS, ACTIONS, rewards.shape[1], len(rewards))
    columns.clear()
    for tick in range(len(rewards)):
        columns.substeps[0].add_row(tick, None, [0] * rewards.shape[1])
    columns.rewards[:] = rewards
    columns.terminated[:] = columns.truncated[:] = False
    for place in terminated:
        columns.terminated[place] = True
    for place in truncated:
        columns.truncated[place] = True
    columns.step_complete[:] = True if complete is None else np.array(complete)[:, None]
    columns.finish([ActorID(0, 0)] * rewards.shape[1], [ActorID(0, 0)] * len(rewards))
    return columns


def scaled(scaling, *args, **kwargs):
    columns = rollout(*args, **kwargs)
    scaling.scale(columns)
    return columns.rewards


def test_rewards_are_divided_by_the_deviation_of_the_discounted_return():
    scaling = RewardScaling(gamma=0.5)
    # returns 1, 2.5, 4.25
    np.testing.assert_allclose(scaled(scaling, [[1], [2], [3]])[:, 0], [1, 2, 3] / np.std([1, 2.5, 4.25]), rtol=1e-5)
    # it goes on with the next rollout: 0.5 * 4.25 + 1
    assert scaled(scaling, [[1]])[0, 0] == pytest.approx(1.0 / np.std([1, 2.5, 4.25, 3.125]), rel=1e-5)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_the_discounted_return_restarts_with_each_episode_of_each_environment(end):
    scaling = RewardScaling(gamma=0.5)
    scaled(scaling, [[1, 1], [1, 1], [1, 1]], **{end: [(1, 0)]})
    assert scaling.state_dict()["mean"] == pytest.approx(np.mean([1, 1.5, 1, 1, 1.5, 1.75]))
    assert scaling.state_dict()["returns"].tolist() == [0.5, 0.875]  # discounted already


def test_sub_steps_belong_to_one_time():
    scaling = RewardScaling(gamma=0.5)
    scaled(scaling, [[1], [2], [3], [4]], complete=[False, True, False, True])
    assert scaling.state_dict()["count"] == 2
    assert scaling.state_dict()["mean"] == pytest.approx(np.mean([3, 0.5 * 3 + 7]))


def test_statistics_are_those_of_all_environments_and_rollouts_at_once():
    rng, scaling, gamma = np.random.default_rng(3), RewardScaling(gamma=0.9), 0.9
    rewards, ends = rng.normal(size=(40, 3)), rng.random((40, 3)) < 0.1
    for first in (0, 7, 30):
        last = {0: 7, 7: 30, 30: 40}[first]
        scaled(scaling, rewards[first:last], terminated=[tuple(place) for place in np.argwhere(ends[first:last])])
    current, seen = np.zeros(3), []
    for reward, end in zip(rewards.astype(np.float32), ends, strict=True):
        current = current * gamma + reward
        seen.append(current)
        current = np.where(end, 0.0, current)
    assert scaling.std == pytest.approx(np.std(seen), rel=1e-6)


def test_scaled_rewards_are_clipped_and_constant_returns_leave_rewards_alone():
    assert scaled(RewardScaling(gamma=0.0), [[2], [2], [2]])[:, 0].tolist() == [2, 2, 2]
    rewards = scaled(RewardScaling(gamma=0.0), [[0]] * 999 + [[100]])
    assert rewards.max() == 10.0


def test_per_actor_rewards_are_scaled_equally():
    columns = rollout([[1], [2], [3]])
    columns.actor_rewards = columns.rewards.copy()
    RewardScaling(gamma=0.5).scale(columns)
    np.testing.assert_array_equal(columns.actor_rewards, columns.rewards)


def test_non_finite_rewards_do_not_enter_the_reward_statistics():
    scaling = RewardScaling(gamma=0.5)
    assert np.isnan(scaled(scaling, [[1], [float("nan")]])[1, 0])
    assert scaling.state_dict()["count"] == 0


def test_a_state_is_continued():
    one, other = RewardScaling(gamma=0.5), RewardScaling(gamma=0.5)
    scaled(one, [[1], [2]])
    other.load_state_dict(one.state_dict())
    np.testing.assert_array_equal(scaled(one, [[3], [4]]), scaled(other, [[3], [4]]))


def test_returns_of_replaced_workers_are_not_continued():
    scaling = RewardScaling(gamma=0.5)
    scaled(scaling, [[1, 1], [1, 1]])
    columns = rollout([[1, 1]])
    columns.renewed = [1]
    scaling.scale(columns)
    assert scaling.state_dict()["returns"].tolist() == [0.875, 0.5]
    assert columns.carried(np.ones((2, 3))).tolist() == [[1, 1, 1], [0, 0, 0]]
    assert columns.carried(np.ones((0, 3))).tolist() == [[0, 0, 0], [0, 0, 0]]
