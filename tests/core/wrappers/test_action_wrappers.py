"""Splitting and discretising actions."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.wrappers.discretize_actions_wrapper import DiscretizeActionsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.split_actions_wrapper import SplitActionsWrapper
from tests.core.wrappers.zoo_env import ZooEnv, zoo

FORCE = {"up": {"indices": [1]}, "right": {"indices": [0]}}


def split(**split_config):
    return SplitActionsWrapper.wrap(zoo(), split_config=split_config)


def discretized(**discretization_config):
    return DiscretizeActionsWrapper.wrap(zoo(), discretization_config=discretization_config)


def test_vectors_are_put_together_from_their_parts():
    env = split(force=FORCE)
    assert set(env.action_space) == {"choice", "levels", "up", "right"}
    assert env.action_space["up"] == spaces.Box(-1, 1, (1,))
    joined = env.action({"choice": 1, "levels": [0, 0], "up": np.array([0.5]), "right": np.array([-0.25])})
    assert joined["force"].tolist() == [-0.25, 0.5]
    assert set(joined) == {"choice", "levels", "force"}
    assert joined["force"].dtype == np.float32


def test_single_entries_of_multi_discrete_actions_become_discrete():
    env = split(levels={"first": {"indices": [1]}, "second": {"indices": [0]}})
    assert env.action_space["first"] == spaces.Discrete(4)
    assert env.action({"choice": 0, "force": 0, "first": 3, "second": 2})["levels"].tolist() == [2, 3]
    assert env.reverse_action({"levels": np.array([2, 3])}) == {"first": 3, "second": 2}


def test_a_part_may_have_the_name_of_the_action():
    env = split(force={"force": {"indices": [1]}, "right": {"indices": [0]}})
    joined = env.action({"choice": 1, "levels": [0, 0], "force": np.array([0.5]), "right": np.array([-0.25])})
    assert joined["force"].tolist() == [-0.25, 0.5]


def test_seeds_of_numpy_determine_samples_of_converted_spaces():
    env = discretized(force={"num_actions": 100})
    samples = []
    for _ in range(2):
        env.seed(np.int64(3))
        samples.append(env.action_space["force"].sample().tolist())
    assert samples[0] == samples[1]


@given(seed=st.integers(0, 1000))
def test_splitting_and_joining_are_inverse(seed):
    env = split(force=FORCE, levels={"all": {"indices": [0, 1]}})
    env.action_space.seed(seed)
    action = env.action_space.sample()
    again = env.reverse_action(env.action(action))
    assert again.keys() == action.keys()
    for name in action:
        np.testing.assert_array_equal(again[name], action[name])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"forse": FORCE}, "Did you mean `force`"),
        ({"force": {"up": {"indices": [0]}}}, "each once"),
        ({"force": {"up": {"indices": [0, 0]}, "b": {"indices": [1]}}}, "each once"),
        ({"force": {"choice": {"indices": [0, 1]}}}, "other actions"),
        ({"force": {"up": [0, 1]}}, "indices"),
        ({"choice": {"up": {"indices": [0]}}}, "one-dimensional"),
    ],
)
def test_faults_in_the_split_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        split(**config)


def test_an_action_that_lacks_a_part_is_named():
    env = split(force=FORCE)
    env.reset()
    with pytest.raises(EnvironmentContractError, match="right"):
        env.step({"choice": 0, "levels": [0, 0], "up": [0.0]})


def test_discretized_choices_are_evenly_spaced_values():
    env = discretized(force={"num_actions": [3, 5], "low": [-1.0, 0.0], "high": [1.0, 1.0]})
    assert env.action_space["force"] == spaces.MultiDiscrete([3, 5])
    assert env.action({"force": [1, 3]})["force"].tolist() == [0.0, 0.75]
    assert env.reverse_action({"force": np.array([0.9, 0.1])})["force"].tolist() == [2, 0]


def test_bounds_are_those_of_the_space_by_default():
    env = discretized(force={"num_actions": [5, 3]})
    twin = discretized(force={"num_actions": [5, 3], "low": -1.0, "high": 1.0})
    action = {"force": np.array([1, 2])}
    np.testing.assert_array_equal(env.action(action)["force"], twin.action(action)["force"])


def test_a_single_number_becomes_discrete():
    env = DiscretizeActionsWrapper.wrap(GymMazeEnv("Pendulum-v1"), discretization_config={"action": {"num_actions": 3}})
    assert env.action_space["action"] == spaces.Discrete(3)
    assert env.action({"action": 2})["action"].tolist() == [2.0]
    assert env.reverse_action({"action": np.array([-1.9])}) == {"action": 0}


@given(counts=st.lists(st.integers(2, 7), min_size=2, max_size=2), seed=st.integers(0, 100))
def test_discretising_is_the_inverse_of_choosing(counts, seed):
    env = discretized(force={"num_actions": counts})
    env.action_space.seed(seed)
    action = env.action_space.sample()
    assert zoo().action_space["force"].contains(env.action(action)["force"])
    assert env.reverse_action(env.action(action))["force"].tolist() == action["force"].tolist()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"forse": {"num_actions": 3}}, "Did you mean `force`"),
        ({"force": {"num_actions": 1}}, "at least 2"),
        ({"force": {"low": 0.0}}, "expected a mapping with"),
        ({"force": {"num_actions": [3, 3, 3]}}, "2 entries"),
        ({"force": {"num_actions": 3, "low": 1.0, "high": -1.0}}, "ascend"),
        ({"force": {"num_actions": 3, "low": -2.0}}, "within the action space"),
        ({"force": {"num_actions": 3, "lo": -1.0}}, "Did you mean `low`"),
        ({"choice": {"num_actions": 3}}, "continuous"),
    ],
)
def test_faults_in_the_discretization_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        discretized(**config)


def test_an_unbounded_action_needs_bounds_in_the_configuration():
    class Unbounded(ZooEnv):
        action_space = spaces.Dict({**ZooEnv.action_space.spaces, "force": spaces.Box(-np.inf, np.inf, (2,))})

    with pytest.raises(ConfigError, match="finite"):
        DiscretizeActionsWrapper.wrap(GymMazeEnv(Unbounded()), discretization_config={"force": {"num_actions": 3}})


def test_split_parts_can_be_discretized():
    env = DiscretizeActionsWrapper.wrap(split(force=FORCE), discretization_config={"up": {"num_actions": 2}})
    env.reset()
    assert env.action_space["up"] == spaces.Discrete(2)
    env.step(env.action_space.sample())
