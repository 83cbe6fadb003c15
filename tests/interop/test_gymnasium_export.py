from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.interop import MazeGymnasiumEnv, to_gymnasium
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.train.parallelization.toy_envs import counting_env


def checked(env):
    """Runs gymnasium's own checker; the boundlessness of an observation space and the missing id are not faults."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(infinity|symmetric and normalized|not having a spec).*")
        check_env(env)


@pytest.mark.parametrize("is_plain", [False, True])
@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "Taxi-v4"])
def test_exported_environments_pass_the_checker_with_dictionary_and_with_plain_spaces(name, is_plain):
    env = GymMazeEnv(name, action_mask=False if is_plain else None)
    exported = to_gymnasium(NoDictSpacesWrapper.wrap(env) if is_plain else env)
    assert isinstance(exported, gymnasium.Env)
    assert isinstance(exported.action_space, spaces.Dict) is not is_plain
    checked(exported)


def test_a_maze_environment_with_a_dictionary_of_several_entries_passes_the_checker():
    checked(to_gymnasium(cutting_env_factory()))


@pytest.mark.parametrize(("end", "expected"), [("terminated", (True, False)), ("truncated", (False, True))])
def test_terminated_and_truncated_are_distinguished(end, expected):
    env = to_gymnasium(counting_env(((2, end),)))
    env.reset()
    *_, first_terminated, first_truncated, _ = env.step({"move": 1})
    observation, reward, terminated, truncated, _ = env.step({"move": 1})
    assert (first_terminated, first_truncated) == (False, False)
    assert (terminated, truncated) == expected
    assert type(reward) is float
    assert observation["count"][0] == 2


def test_a_time_limit_of_maze_truncates():
    env = to_gymnasium(TimeLimitWrapper.wrap(GymMazeEnv("Pendulum-v1"), max_episode_steps=1))
    env.reset(seed=1)
    assert env.step(env.action_space.sample())[2:4] == (False, True)


def test_the_seed_of_reset_determines_the_episodes_that_follow():
    def first_observations(seed):
        env = to_gymnasium(GymMazeEnv("CartPole-v1"))
        return [env.reset(seed=seed)[0]["observation"], env.reset()[0]["observation"]]

    np.testing.assert_array_equal(first_observations(3), first_observations(3))
    assert not np.array_equal(first_observations(3), first_observations(4))
    assert not np.array_equal(*first_observations(3))


def test_frames_come_from_the_gymnasium_environment_inside():
    env = to_gymnasium(GymMazeEnv("CartPole-v1"), render_mode="rgb_array")
    assert env.render_mode == "rgb_array"
    env.reset(seed=1)
    frame = env.render()
    assert frame.ndim == 3
    assert frame.dtype == np.uint8
    checked(env)


class DrawingRenderer:
    def render(self, maze_state, maze_action, events, **kwargs):
        import matplotlib.pyplot as plt

        plt.figure("state", figsize=(2, 1))
        plt.clf()
        plt.title(str(maze_state["count"]))
        plt.pause(10)


def test_frames_come_from_the_maze_renderer_without_opening_a_window(monkeypatch):
    import matplotlib.pyplot as plt

    plt.close("all")  # figures of other tests
    maze_env = counting_env(((5, "truncated"),))
    monkeypatch.setattr(type(maze_env.core_env), "get_renderer", lambda self: DrawingRenderer())
    env = to_gymnasium(maze_env, render_mode="rgb_array")
    env.reset()
    first = env.render()
    env.step({"move": 1})
    second = env.render()
    assert first.shape == (100, 200, 3)
    assert not np.array_equal(first, second)
    assert plt.get_fignums() == []


def test_an_unknown_render_mode_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"one of \['human', 'rgb_array'\], found 'ascii'"):
        to_gymnasium(GymMazeEnv("CartPole-v1"), render_mode="ascii")


def test_environments_with_several_sub_steps_are_refused_with_the_way_out():
    env = StructuredCuttingEnv(cutting_env_factory())
    with pytest.raises(ConfigError, match=r"sub-steps \[0, 1\].*flat variant"):
        to_gymnasium(env)


def test_objects_that_are_no_maze_environment_are_refused():
    with pytest.raises(ConfigError, match="expected a Maze environment, found CartPole"):
        to_gymnasium(gymnasium.make("CartPole-v1").unwrapped)


def test_the_exported_environment_exposes_the_maze_environment():
    maze_env = GymMazeEnv("CartPole-v1")
    env = to_gymnasium(maze_env)
    assert env.maze_env is maze_env
    assert env.unwrapped is env
    assert isinstance(env, MazeGymnasiumEnv)
    assert not isinstance(env, MazeEnv)
