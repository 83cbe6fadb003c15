"""Observations and actions of every kind of space, and masks that environments tell in other ways."""

from __future__ import annotations

import copy

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.errors import ConfigError
from maze.core.wrappers.gym_adapters import ArrayObservations, adapted, tells_action_mask
from maze.core.wrappers.gym_make import newest_version
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv, make_gym_maze_env


class Shown(gymnasium.Env):
    """Shows samples of a space and keeps the actions it gets."""

    def __init__(self, observation_space, action_space=None, info=None):
        self.observation_space = observation_space
        self.action_space = action_space or spaces.Discrete(2)
        self.info = info or {}
        self.actions = []

    def reset(self, *, seed=None, options=None):
        self.observation_space.seed(seed)
        return self.observation_space.sample(), dict(self.info)

    def step(self, action):
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return self.observation_space.sample(), 1.0, False, False, dict(self.info)


LEAF = st.sampled_from(
    [
        spaces.Box(-1.0, 1.0, (2,), np.float64),
        spaces.Discrete(3, start=1),
        spaces.MultiBinary(2),
        spaces.Sequence(spaces.Box(-1.0, 1.0, (2,))),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Graph(spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(3), None),
        spaces.OneOf([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (3,))]),
    ]
)
NESTED = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=5,
)


@given(space=NESTED, seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_observations_of_any_space_are_elements_of_a_flat_dictionary(space, seed):
    env = GymMazeEnv(Shown(copy.deepcopy(space)))
    env.seed(seed)
    for observation in (env.reset(), env.step({"action": 0})[0]):
        assert env.observation_space.contains(observation), (env.observation_space, observation)


def test_sequences_graphs_and_alternatives_by_hand():
    space = spaces.Dict(
        items=spaces.Sequence(spaces.Box(0, 9, (2,), np.float32)),
        net=spaces.Graph(spaces.Discrete(3), spaces.Discrete(2)),
        either=spaces.OneOf([spaces.Discrete(2), spaces.Box(-5, 5, (1,), np.float32)]),
    )
    env = ArrayObservations(Shown(space), [], {"items": 3, "net": 2})
    shown = env.observation(
        {
            "items": (np.array([1, 2]), np.array([3, 4])),
            "net": spaces.GraphInstance(np.array([2, 0, 1]), np.array([0, 1]), np.array([[0, 1], [1, 2]])),
            "either": (1, np.array([4.0])),
        }
    )
    assert shown["items"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert shown["items_mask"].tolist() == [1, 1, 0]
    assert shown["net"].tolist() == [[0, 0, 1], [1, 0, 0]]  # the third node is cut off
    assert shown["net_mask"].tolist() == [1, 1]
    assert shown["net_adjacency"].tolist() == [[0, 1], [1, 0]]
    assert shown["either"][-2:].tolist() == pytest.approx([4.0, 0.0]) or 4.0 in shown["either"]


def test_texts_are_left_out_with_a_line_dropped_silently_or_encoded():
    space = spaces.Dict(mission=spaces.Text(5, charset="abc"), x=spaces.Discrete(2))
    with pytest.warns(UserWarning, match=r"are left out: mission. env.drop=\[mission\] .*env.encode=\{mission: <n>\}"):
        assert list(GymMazeEnv(Shown(space)).observation_space) == ["x"]
    assert list(adapted(Shown(space), drop=["mission"]).observation_space) == ["x"]
    env = adapted(Shown(space), encode={"mission": 4})
    assert env.observation({"mission": "cab", "x": 1})["mission"].tolist() == [3, 1, 2, 0]
    assert env.observation_space["mission"] == spaces.MultiDiscrete([4] * 4)


def test_a_container_is_dropped_as_a_whole():
    space = spaces.Dict(a=spaces.Dict(b=spaces.Discrete(2), c=spaces.Text(3)), x=spaces.Discrete(2))
    assert list(adapted(Shown(space), drop=["a"]).observation_space) == ["x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop": ["misson"]}, r"env.drop: there is no observation `misson`. Did you mean `mission`"),
        ({"encode": {"y": 3}}, r"env.encode: there is no observation `y`"),
        ({"drop": ["mission", "x"]}, "no observation is left"),
    ],
)
def test_mistakes_are_named(arguments, message):
    space = spaces.Dict(mission=spaces.Text(5), x=spaces.Discrete(2))
    with pytest.raises(ConfigError, match=message):
        adapted(Shown(space), **arguments)


def test_nested_actions_reach_the_environment_as_its_elements():
    space = spaces.Dict(
        move=spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,))]), stop=spaces.Discrete(3, start=1)
    )
    shown = Shown(spaces.Discrete(2), space)
    env = GymMazeEnv(shown)
    assert list(env.action_space) == ["move_0", "move_1", "stop"]
    env.reset()
    env.step(env.action_space.sample())
    assert len(shown.actions) == 1


def test_masks_in_the_info_or_by_a_method_become_observations():
    shown = Shown(spaces.Discrete(4), info={"action_mask": np.array([0, 1])})
    assert tells_action_mask(shown)
    assert not tells_action_mask(Shown(spaces.Discrete(4)))
    assert not tells_action_mask(Shown(spaces.Discrete(4), info={"action_mask": np.ones(3)}))
    shown = Shown(spaces.Discrete(4))
    shown.action_masks = lambda: [True, False]
    assert tells_action_mask(shown)


def test_taxi_shows_its_mask_unless_it_is_not_wanted():
    env = make_gym_maze_env(newest_version("Taxi-v3"))
    env.seed(0)
    observation = env.reset()
    assert observation["action_mask"].shape == (6,)
    assert 0 < observation["action_mask"].sum() < 6
    np.testing.assert_array_equal(
        observation["action_mask"], env.core_env.env.unwrapped.action_mask(int(observation["observation"]))
    )
    assert "action_mask" not in make_gym_maze_env(newest_version("Taxi-v3"), action_mask=False).observation_space.spaces


def test_wrappers_of_gymnasium_are_named_or_given_by_path_with_arguments():
    env = make_gym_maze_env(
        "CartPole-v1",
        kwargs={"max_episode_steps": 7},
        gym_wrappers=["gymnasium.wrappers.NormalizeObservation", {"TransformReward": {"func": abs}}],
    )
    assert isinstance(env.core_env.env, gymnasium.wrappers.TransformReward)
    env.reset()
    assert [env.step({"action": i % 2})[2] for i in range(7)][-1]
    with pytest.raises(ConfigError, match=r"env.gym_wrappers\[0\]: TimeLimit cannot wrap"):
        make_gym_maze_env("CartPole-v1", gym_wrappers=["TimeLimit"])


def test_modules_are_imported_first_and_an_unknown_id_names_both_ways():
    with pytest.raises(ConfigError, match=r"env.import: module `no_such_module` cannot be imported"):
        make_gym_maze_env("CartPole-v1", **{"import": ["no_such_module"]})
    with pytest.raises(ConfigError, match=r"env.import=\[<module>\] or env.name=<module>:Nowhere-v0"):
        make_gym_maze_env("Nowhere-v0")
