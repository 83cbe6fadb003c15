"""Observations and actions of every kind of space, and masks that environments tell in other ways."""

from __future__ import annotations

import copy
import importlib
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.utils.config_utils import EnvFactory
from maze.core.wrappers.gym_adapters import ArrayObservations, CurrentApi, adapted, newest_version, with_action_mask
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
        spaces.Sequence(spaces.Discrete(3), stack=True),
        spaces.Sequence(spaces.Dict(x=spaces.Box(-1.0, 1.0, (2,)), y=spaces.Discrete(3)), stack=True),
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


def test_sequences_match_hand_worked_values():
    space = spaces.Dict(items=spaces.Sequence(spaces.Box(0, 9, (2,), np.float32)))
    env = ArrayObservations(Shown(space), [], {"items": 3})
    shown = env.observation({"items": (np.array([1, 2]), np.array([3, 4]))})
    assert shown["items"].tolist() == [[1, 2], [3, 4], [0, 0]]
    assert shown["items_mask"].tolist() == [1, 1, 0]
    one = spaces.Dict(x=spaces.Box(0, 9, (2,), np.float32), y=spaces.Discrete(2))
    env = ArrayObservations(Shown(spaces.Dict(items=spaces.Sequence(one, stack=True))), [], {"items": 2})
    shown = env.observation({"items": {"x": np.array([[1, 2], [3, 4], [5, 6]]), "y": np.array([0, 1, 0])}})
    assert shown["items"].tolist() == [[1, 2, 1, 0], [3, 4, 0, 1]]
    assert shown["items_mask"].tolist() == [1, 1]


def test_texts_are_left_out_with_a_line_dropped_silently_or_encoded():
    space = spaces.Dict(mission=spaces.Text(5, charset="abc"), x=spaces.Discrete(2))
    with pytest.warns(UserWarning, match=r"are left out: mission. env.drop=\[mission\] .*env.encode=\{<text>: <n>\}"):
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
        ({"drop": ["misson"]}, r"env.drop: no observation `misson`. Did you mean `mission`"),
        ({"encode": {"y": 3}}, r"env.encode: no observation `y`"),
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
    by_info = Shown(spaces.Discrete(4), info={"action_mask": np.array([1, 0])})
    by_method, by_other_method = Shown(spaces.Discrete(4)), Shown(spaces.Discrete(4))
    by_method.action_masks = lambda: [True, False]
    by_other_method.action_mask = lambda state: [True, False]  # the state is unknown
    by_other_method.valid_action_mask = lambda mode=None: [True, False]
    for env in (by_info, by_method, by_other_method):
        assert with_action_mask(env).reset()[0]["action_mask"].tolist() == [1, 0]
    for env in (Shown(spaces.Discrete(4)), Shown(spaces.Discrete(4), info={"action_mask": np.ones(3)})):
        assert with_action_mask(env) is env


class Masked(Shown):
    """The mask is in the info; it is missing after the last step."""

    def __init__(self, key="action_mask"):
        super().__init__(spaces.Discrete(4), info={key: np.array([0, 1])})

    def step(self, action):
        observation, _, _, _, _ = super().step(action)
        return observation, 1.0, True, False, {}


TARGET = f"{__name__}.Masked"
WAYS = {
    "instance": lambda: GymMazeEnv(Masked()),
    "factory with an instance": EnvFactory(Masked()),
    "factory with a class": EnvFactory(Masked),
    "target": EnvFactory({"_target_": TARGET}),
    "target that is required to have one": EnvFactory({"_target_": TARGET, "action_mask": True}),
    "target with another name": EnvFactory({"_target_": TARGET, "key": "legal", "action_mask": "legal"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_mask_is_passed_on_for_every_form_of_environment(way):
    env = WAYS[way]()
    assert env.reset()["action_mask"].tolist() == [0, 1]
    observation, _, done, _ = env.step({"action": 1})
    assert done
    assert observation["action_mask"].tolist() == [1, 1]  # no action follows


def test_a_mask_is_left_out_or_required():
    assert list(GymMazeEnv(Masked(), action_mask=False).observation_space) == ["observation"]
    assert list(EnvFactory({"_target_": TARGET, "action_mask": False})().observation_space) == ["observation"]
    with pytest.raises(ConfigError, match=r"env.action_mask=True: expected a mask of actions of Masked"):
        EnvFactory({"_target_": TARGET, "key": "legal", "action_mask": True})()


def test_gymnasium_wrappers_are_refused_for_other_environments():
    config = {"_target_": "tests.core.env.tutorial_cutting.cutting_env_factory", "action_mask": True}
    with pytest.raises(ConfigError, match=r"env: settings of single gymnasium .*`action_mask`.*cutting_env_factory"):
        EnvFactory(config)()


@pytest.fixture
def registered(request):
    """Registers the entry point that a test is parametrised with as `Registered-v0`."""
    gymnasium.register("Registered-v0", entry_point=request.param, max_episode_steps=3)
    yield "Registered-v0"
    del gymnasium.registry["Registered-v0"]


@pytest.mark.parametrize(
    "registered", [lambda: Shown(spaces.Discrete(4), info={"legal": [0, 1], "steps": 3})], indirect=True
)
def test_a_mask_of_another_name_is_named(registered):
    assert "action_mask" not in make_gym_maze_env(registered).observation_space.spaces
    env = make_gym_maze_env(registered, action_mask="legal")
    assert env.reset()["action_mask"].tolist() == [0, 1]
    with pytest.raises(ConfigError, match=r"env.action_mask=legl: .* found `info` with \['legal', 'steps'\]"):
        make_gym_maze_env(registered, action_mask="legl")


def test_a_mask_that_is_missing_later_is_reported():
    shown = Shown(spaces.Discrete(4), info={"action_mask": np.array([0, 1])})
    gymnasium.register("Forgetful-v0", entry_point=lambda: shown)
    try:
        env = make_gym_maze_env("Forgetful-v0")
    finally:
        del gymnasium.registry["Forgetful-v0"]
    env.reset()
    shown.info = {}
    with pytest.raises(
        EnvironmentContractError,
        match=r"Forgetful-v0: expected the mask of valid actions `action_mask`.* found `info` with \[\]",
    ):
        env.step({"action": 0})


class OlderApi(gymnasium.Env):
    """`reset` takes no seed and gives one value, `step` gives four."""

    observation_space = spaces.Dict(a=spaces.Dict(x=spaces.Discrete(100)), b=spaces.Discrete(2))
    action_space = spaces.Discrete(2)
    metadata = {"render_modes": ["ansi"]}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self):
        self.steps = 0
        return self._shown()

    def step(self, action):
        self.steps += 1
        return self._shown(), 1.0, self.steps == 5, {}

    def _shown(self):
        return {"a": {"x": int(self.np_random.integers(100))}, "b": 0}


@pytest.mark.filterwarnings("ignore:.*Core environment is written in old step API")
@pytest.mark.parametrize("registered", [OlderApi], indirect=True)
def test_a_registered_environment_of_the_older_api_works_within_other_wrappers(registered):
    env = make_gym_maze_env(registered)
    xs = []
    for _ in range(2):
        env.seed(3)
        xs.append(env.reset()["a_x"])
        dones = [env.step({"action": 0})[2] for _ in range(3)]
        assert dones == [False, False, True]  # gymnasium's own time limit, which unpacks five values
    assert xs[0] == xs[1]
    env.core_env.set_render_mode("ansi")  # makes it again
    assert "a_x" in env.reset()


def test_older_api_distinguishes_termination_from_truncation():
    env = CurrentApi(OlderApi())
    env.reset(seed=1)
    assert [env.step(0)[2:4] for _ in range(5)][-1] == (True, False)
    with pytest.raises(EnvironmentContractError, match=r"takes no options, found \{'start': 2\}"):
        env.reset(options={"start": 2})


class Started(gymnasium.Env):
    """Starts where the options say."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.array([(options or {}).get("start", 0.0)]), {}

    def step(self, action):
        return np.zeros(1), np.array([1.0, 2.0]), False, False, {}


@pytest.mark.parametrize("registered", [Started], indirect=True)
def test_options_are_given_to_every_reset(registered):
    env = make_gym_maze_env(registered, reset_options={"start": 7.0})
    assert [env.reset()["observation"].tolist() for _ in range(2)] == [[7.0], [7.0]]


@pytest.mark.filterwarnings("ignore:.*The reward returned by")
@pytest.mark.parametrize("registered", [Started], indirect=True)
def test_a_reward_of_several_numbers_is_weighed_or_refused_with_what_to_do(registered):
    def reward(**arguments):
        env = make_gym_maze_env(registered, **arguments)
        env.reset()
        return env.step({"action": 0})[1]

    with pytest.raises(EnvironmentContractError, match=r"expected a number as the reward, found .*env.reward_weights"):
        reward()
    assert reward(reward_weights=[3.0, 0.5]) == 4.0
    with pytest.raises(ConfigError, match=r"env.reward_weights: expected weights for .*, found 3"):
        reward(reward_weights=[3.0, 0.5, 1.0])


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
    reshaped = make_gym_maze_env("CartPole-v1", gym_wrappers=[{"ReshapeObservation": {"shape": [2, 2]}}])
    assert reshaped.observation_space["observation"].shape == (2, 2)  # gymnasium insists on a tuple
    with pytest.raises(ConfigError, match=r"env.gym_wrappers\[0\]: TimeLimit cannot wrap"):
        make_gym_maze_env("CartPole-v1", gym_wrappers=["TimeLimit"])


def test_modules_are_imported_first_and_an_unknown_id_names_both_ways():
    with pytest.raises(ConfigError, match=r"env.import: module `no_such_module` cannot be imported"):
        make_gym_maze_env("CartPole-v1", **{"import": ["no_such_module"]})
    with pytest.raises(ConfigError, match=r"env.import=\[<module>\] or env.name=<module>:Nowhere-v0"):
        make_gym_maze_env("Nowhere-v0")


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A directory of installed packages beside which no others are searched."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    importlib.invalidate_caches()
    return tmp_path


def _install(directory, name, requirement, source):
    """An installed package, as far as Python's metadata tell."""
    package, info = directory / name, directory / f"{name}-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text(source)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\nRequires-Dist: {requirement}\n")
    (info / "RECORD").write_text(f"{name}/__init__.py,,\n")


def test_an_installed_package_that_registers_an_unknown_id_is_imported(site):
    source = "import gymnasium\ngymnasium.register('Within-v0', 'gymnasium.envs.classic_control:CartPoleEnv')"
    _install(site, "registers_within", "gymnasium>=1", source)
    try:
        assert make_gym_maze_env("Within-v0").observation_space["observation"].shape == (4,)
    finally:
        gymnasium.registry.pop("Within-v0", None)
        sys.modules.pop("registers_within", None)


@pytest.mark.parametrize("registered", [object], indirect=True)
def test_an_entry_point_that_makes_something_else_is_refused(registered):
    with pytest.raises(ConfigError, match=r"`Registered-v0` cannot be made .*shimmy"):
        make_gym_maze_env(registered)
