"""Stacking of observations."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.core.wrappers.test_small_wrappers import CountingEnv
from tests.core.wrappers.zoo_env import zoo

ACTION = {"action": 0}


def counting(**entry):
    entry = {"observation": "observation", "stack_steps": 3, **entry}
    return ObservationStackWrapper.wrap(GymMazeEnv(CountingEnv()), stack_config=[entry])


def test_the_latest_observations_are_stacked_the_oldest_first():
    env = counting()
    assert env.reset()["observation"].tolist() == [[0], [0], [0]]
    assert [env.step(ACTION)[0]["observation"].ravel().tolist() for _ in range(3)] == [[0, 0, 1], [0, 1, 2], [1, 2, 3]]


def test_no_state_of_an_episode_remains_in_the_next_one():
    env = counting()
    env.reset()
    for _ in range(5):
        env.step(ACTION)
    assert env.reset()["observation"].tolist() == [[0], [0], [0]]


def test_the_last_observation_of_a_truncated_episode_is_stacked_like_any_other():
    env = TimeLimitWrapper.wrap(counting(), max_episode_steps=2)
    env.reset()
    env.step(ACTION)
    observation, _, done, _ = env.step(ACTION)
    assert done
    assert observation["observation"].ravel().tolist() == [0, 1, 2]


def test_a_delta_stack_contains_differences_and_the_latest_observation():
    env = counting(delta=True, tag="delta", keep_original=True)
    assert env.reset()["observation-delta"].ravel().tolist() == [0, 0, 0]
    for _ in range(4):
        observation = env.step(ACTION)[0]
    assert observation["observation-delta"].ravel().tolist() == [1, 1, 4]
    assert observation["observation"].tolist() == [4]


def test_differences_of_unsigned_integers_may_be_negative():
    env = ObservationStackWrapper.wrap(zoo(), stack_config=[{"observation": "image", "stack_steps": 2, "delta": True}])
    assert env.observation_space["image"].dtype == np.float32
    high, low = np.full((6, 4, 3), 200, np.uint8), np.full((6, 4, 3), 10, np.uint8)
    env.observation({"image": high})
    assert env.observation({"image": low})["image"][0].max() == -190.0


def test_changing_returned_observations_does_not_affect_later_stacks():
    env = counting()
    env.reset()["observation"][:] = 99
    assert env.step(ACTION)[0]["observation"].ravel().tolist() == [0, 0, 1]


def test_every_sub_step_has_its_own_history():
    env = ObservationStackWrapper.wrap(
        StructuredCuttingEnv(cutting_env_factory()),
        stack_config=[{"observation": "ordered_piece", "stack_steps": 2}],
    )
    assert env.observation_spaces_dict[1] == env.env.observation_spaces_dict[1]
    assert env.reset()["ordered_piece"].shape == (2, 2)
    assert env.step({"piece_idx": 0})[0]["selected_piece"].shape == (2,)


def test_converted_states_have_a_history_of_their_own():
    env = counting()
    env.reset()
    env.step(ACTION)
    states = [np.array([value], np.float32) for value in (5, 6)]
    first, second = (
        env.get_observation_and_action_dicts(state, None, is_first)[0][0]["observation"].ravel().tolist()
        for state, is_first in zip(states, (True, False), strict=True)
    )
    assert (first, second) == ([5, 5, 5], [5, 5, 6])
    assert env.step(ACTION)[0]["observation"].ravel().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"observation": "vektor", "stack_steps": 2}, "Did you mean `vector`"),
        ({"observation": "action_mask", "stack_steps": 2}, "never stacked"),
        ({"observation": "category", "stack_steps": 2}, "Box"),
        ({"observation": "vector", "stack_steps": 0}, "at least 1"),
        ({"observation": "vector"}, "stack_steps"),
        ({"observation": "vector", "stack_steps": 2, "keep_original": True}, "tag"),
        ({"observation": "vector", "stack_steps": 2, "tags": "x"}, "Did you mean `tag`"),
    ],
)
def test_faults_in_the_configuration_are_named_with_their_place(entry, message):
    with pytest.raises(ConfigError, match=message) as raised:
        ObservationStackWrapper.wrap(zoo(), stack_config=[entry])
    assert "stack_config[0]" in str(raised.value)


def test_the_space_of_a_stack_repeats_that_of_the_observation():
    env = ObservationStackWrapper.wrap(zoo(), stack_config=[{"observation": "image", "stack_steps": 4}])
    assert env.observation_space["image"] == spaces.Box(0, 255, (4, 6, 4, 3), np.uint8)
