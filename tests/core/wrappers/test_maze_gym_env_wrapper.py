"""Any gymnasium environment as a Maze environment."""

import copy
import functools
import itertools
import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.api.run_context import RunContext
from maze.core.env.base_env import is_truncated
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.utils.config_utils import EnvFactory
from maze.core.wrappers.gym_adapters import newest_version
from maze.core.wrappers.gym_vector_env import GymVectorMazeEnv
from maze.core.wrappers.maze_gym_env_wrapper import (
    GymActionConversion,
    GymCoreEnv,
    GymMazeEnv,
    GymObservationConversion,
    make_gym_maze_env,
)
from maze.utils.check_env import check_env


class Echo(gymnasium.Env):
    """Remembers the actions it gets; observations are samples of any space."""

    def __init__(self, action_space, observation_space=None, end=(False, False), info=None):
        self.action_space = action_space
        self.observation_space = observation_space or spaces.Box(-1, 1, (2,), np.float32)
        self.end, self.info, self.actions, self.seeds = end, info or {}, [], []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action!r} is not an element of {self.action_space}"
        self.actions.append(action)
        return self.observation_space.sample(), 1, *self.end, dict(self.info)


class Legacy:
    """The older API: one value from reset, four from step, `seed` a method."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(0, 9, (1,), np.float32)
    seeds: list = []

    def seed(self, seed):
        self.seeds = [seed]

    def reset(self):
        return np.zeros(1, np.float32)

    def step(self, action):
        return np.ones(1, np.float32), 2.0, True, {"TimeLimit.truncated": True}

    def close(self): ...


LEAVES = [
    spaces.Discrete(3),
    spaces.Discrete(3, start=-5),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([2, 3], start=[4, -1]),
    spaces.MultiBinary(3),
    spaces.Box(-1.0, 2.0, (2,), np.float32),
    spaces.Box(-1.0, 2.0, (2, 2), np.float64),
    spaces.Box(0, 255, (2, 2), np.uint8),
]
SPACES = [*LEAVES, spaces.Tuple(LEAVES), spaces.Dict({f"part {i}": leaf for i, leaf in enumerate(LEAVES)})]


@pytest.mark.parametrize("space", SPACES, ids=str)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_actions_reach_the_environment_as_its_elements_and_convert_back(space, seed):
    env = Echo(space)
    conversion = GymActionConversion(env)
    agent_space = conversion.space()
    agent_space.seed(seed)
    action = agent_space.sample()
    gym_action = conversion.space_to_maze(action, None)
    assert space.contains(gym_action)
    back = conversion.maze_to_space(gym_action)
    assert agent_space.contains(back)
    np.testing.assert_equal({key: np.asarray(value) for key, value in action.items()}, back)


@pytest.mark.parametrize("space", SPACES, ids=str)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6))
def test_observations_become_elements_of_a_flat_dictionary_space_and_convert_back(space, seed):
    conversion = GymObservationConversion(Echo(spaces.Discrete(2), space))
    space.seed(seed)
    observation = conversion.maze_to_space(space.sample())
    assert conversion.space().contains(observation)
    for key, value in observation.items():
        assert isinstance(value, np.ndarray)
        assert value.dtype == conversion.space()[key].dtype != np.float64
    again = conversion.maze_to_space(conversion.space_to_maze(observation))
    np.testing.assert_equal(again, observation)


def test_classes_and_functions_are_called_with_the_arguments():
    space = spaces.Discrete(3)
    for make in (Echo, functools.partial(Echo)):
        assert GymMazeEnv(make, action_space=space).action_space["action"] == space


@pytest.mark.parametrize(
    ("env", "arguments", "message"),
    [
        (Echo, {}, r"missing argument.* `action_space`"),
        (object, {}, "Expected an environment of gymnasium, .* found <object"),
        (3, {}, "found 3"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(env, arguments, message):
    with pytest.raises(ConfigError, match=message):
        GymMazeEnv(env, **arguments)


def test_keys_name_single_entries_number_tuples_and_keep_dictionaries():
    two = (spaces.Discrete(2), spaces.Discrete(3, start=1))
    assert list(GymMazeEnv(Echo(two[0])).action_space) == ["action"]
    env = GymMazeEnv(Echo(spaces.Tuple(two), spaces.Tuple(two)))
    assert list(env.action_space) == ["action_0", "action_1"]
    assert list(env.observation_space) == ["observation_0", "observation_1"]
    env = GymMazeEnv(Echo(spaces.Dict(a=two[0], b=two[1]), spaces.Dict(c=two[0])))
    assert (list(env.action_space), list(env.observation_space)) == (["a", "b"], ["c"])


@pytest.mark.parametrize("action", [2, np.int64(2), np.array(2), np.array([2])])
def test_discrete_actions_count_from_zero_for_the_agent_and_from_start_for_gymnasium(action):
    gym_env = Echo(spaces.Discrete(3, start=10))
    env = GymMazeEnv(gym_env)
    assert env.action_space == spaces.Dict({"action": spaces.Discrete(3)})
    env.reset()
    env.step({"action": action})
    assert gym_env.actions == [12]
    assert type(gym_env.actions[0]) is int


@pytest.mark.parametrize("action", [{"action": 0.7}, {"action": np.float32(1)}, {"wrong key": 1}, 1])
def test_actions_of_the_wrong_kind_are_refused_and_not_truncated(action):
    env = GymMazeEnv("CartPole-v1")
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"GymMazeEnv .*sub-step 0: .*(Discrete\(2\)|\['action'\])"):
        env.step(action)


def test_continuous_actions_are_clipped_on_their_way_to_the_environment_only():
    gym_env = Echo(spaces.Box(np.array([-1, -np.inf]), np.array([1, np.inf]), (2,), np.float64))
    env = GymMazeEnv(gym_env)
    env.reset()
    action = {"action": np.array([3.0, 7.0], np.float32)}
    env.step(action)
    np.testing.assert_array_equal(gym_env.actions[0], [1.0, 7.0])
    assert gym_env.actions[0].dtype == np.float64
    assert action["action"].tolist() == [3.0, 7.0]


def test_double_precision_boxes_become_single_precision_with_their_bounds():
    space = spaces.Box(np.array([-np.finfo(np.float64).max, 0]), np.array([1e300, 0.1]), dtype=np.float64)
    box = GymMazeEnv(Echo(spaces.MultiBinary(2), space)).observation_space["observation"]
    assert box.dtype == np.float32
    assert box.low.tolist() == [-np.inf, 0]
    assert box.high.tolist() == [np.inf, np.float32(0.1)]


@pytest.mark.parametrize(
    "space",
    [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.Dict(a=spaces.Text(3)), "no space at all"],
    ids=str,
)
def test_unsupported_actions_are_named_with_what_to_do(space):
    with pytest.raises(ConfigError, match=r"action space.*expected Box, Discrete"):
        GymMazeEnv(Echo(space))


def test_entries_that_are_no_spaces_are_not_observations():
    with pytest.raises(ConfigError, match=r"observation space.*expected Box, Discrete"):
        GymMazeEnv(Echo(spaces.Discrete(2), "no space at all"))


@pytest.mark.parametrize(
    ("end", "info", "done", "truncated"),
    [
        ((False, False), {}, False, False),
        ((True, False), {}, True, False),
        ((False, True), {}, True, True),
        ((True, True), {}, True, False),  # termination wins
        ((True, False), {"TimeLimit.truncated": True}, True, False),  # left there by some inner wrapper
    ],
)
def test_truncation_is_distinguished_from_termination(end, info, done, truncated):
    env = GymMazeEnv(Echo(spaces.Discrete(2), end=end, info=info))
    env.reset()
    _, reward, is_done, step_info = env.step({"action": 0})
    assert (is_done, is_truncated(is_done, step_info)) == (done, truncated)
    assert type(reward) is float


class Silent(Echo):
    def step(self, action):
        return *super().step(action)[:-1], None

    def action_masks(self):
        return np.ones(2, np.int8)


@pytest.mark.parametrize("end", [*itertools.product((False, True), repeat=2)])
def test_no_info_counts_as_an_empty_one(end):
    env = GymMazeEnv(Silent(spaces.Discrete(2), end=end))
    assert "action_mask" in env.reset()
    *_, done, info = env.step({"action": 0})
    assert (done, is_truncated(done, info)) == (any(end), end == (False, True))


def test_the_older_api_works_and_its_truncation_is_kept():
    legacy = Legacy()
    env = GymMazeEnv(legacy)
    env.seed(4)
    assert env.reset() == {"observation": np.zeros(1)}
    observation, reward, done, info = env.step({"action": 1})
    assert (observation["observation"].item(), reward, done, is_truncated(done, info)) == (1.0, 2.0, True, True)
    assert legacy.seeds == [4]
    assert isinstance(env.core_env, GymCoreEnv)


def test_a_seed_starts_a_reproducible_sequence_of_episodes_and_of_sampled_actions():
    def sequence(env):
        env.seed(7)
        return [env.reset()["observation"].tolist() for _ in range(3)], [env.action_space.sample() for _ in range(9)]

    env = GymMazeEnv("CartPole-v1")
    first = sequence(env)
    assert first == sequence(env) == sequence(GymMazeEnv("CartPole-v1"))
    assert len({tuple(observation) for observation in first[0]}) == 3
    gym_env = Echo(spaces.MultiBinary(1))
    sequence(GymMazeEnv(gym_env))
    assert gym_env.seeds == [7, None, None]


@pytest.mark.parametrize(("retired", "current"), [("LunarLander-v2", "LunarLander-v3"), ("Pendulum-v0", "Pendulum-v1")])
def test_retired_id_selects_the_current_version_with_a_warning(retired, current):
    with pytest.warns(UserWarning, match=f"`{retired}` is retired; `{current}`"):
        env = GymMazeEnv(retired)
    assert env.core_env.env.spec.id == current
    env.close()
    assert newest_version("CarRacing-v0") == "CarRacing-v3"


def test_an_unknown_id_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"`CartPool-v1` cannot be made.*Did you mean `CartPole-v1`"):
        GymMazeEnv("CartPool-v1")
    with pytest.raises(ConfigError, match=r"no_such_module.*env\.name=<module>:Env-v0\."):
        GymMazeEnv("no_such_module:Env-v0")
    with pytest.raises(ConfigError, match=r"the environment .* exists"):
        GymMazeEnv(Legacy(), render_mode="human")


def test_the_id_that_failed_is_not_suggested():
    def broken(**kwargs):
        raise ModuleNotFoundError("no module named `simulator`")

    gymnasium.register("BrokenStock-v0", entry_point=broken)
    try:
        with pytest.raises(ConfigError, match="no module named `simulator`") as error:
            GymMazeEnv("BrokenStock-v0")
    finally:
        gymnasium.registry.pop("BrokenStock-v0")
    assert "Did you mean `BrokenStock-v0`" not in str(error.value)


def test_vector_environment_is_refused_as_a_single_one_and_used_for_several():
    vector_env = gymnasium.make_vec("CartPole-v1", num_envs=2)
    with pytest.raises(ConfigError, match=r"expected a single environment"):
        GymMazeEnv(vector_env)
    assert isinstance(EnvFactory(vector_env)(), GymVectorMazeEnv)
    report = check_env(vector_env)
    assert report.findings == []
    assert str(report).startswith("CartPole-v1: ")
    vector_env.close()


def test_render_mode_is_passed_to_make_and_without_one_nothing_is_drawn():
    env = make_gym_maze_env("CartPole-v1")
    env.reset()
    with pytest.warns(UserWarning, match="without specifying any render mode.*render_mode="):
        env.render()  # as documented loops do
    env.core_env.set_render_mode("rgb_array")
    env.reset()
    assert env.core_env.env.render().shape == (400, 600, 3)
    assert env.step({"action": 0})[2] is False
    env.close()


def test_a_rendered_picture_is_shown(monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    env = make_gym_maze_env("CartPole-v1", render_mode="rgb_array")
    env.reset()
    env.render()
    assert plt.gca().images[0].get_array().shape == (400, 600, 3)
    plt.close("all")
    env.close()


@pytest.mark.parametrize("make_twin", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))])
def test_copies_continue_equally(make_twin):
    env = GymMazeEnv("CartPole-v1")
    env.seed(3)
    env.reset()
    twin = make_twin(env)
    for action in (0, 1, 1):
        np.testing.assert_equal(env.step({"action": action})[:3], twin.step({"action": action})[:3])
    np.testing.assert_equal(env.reset(), twin.reset())
    assert twin.get_renderer().env is twin.core_env.env


def test_an_argument_that_the_environment_does_not_take_is_named():
    with pytest.raises(ConfigError, match=r"CartPole-v1.*cannot be made with the arguments .*foo"):
        make_gym_maze_env("CartPole-v1", foo=1)


def test_rewards_of_gymnasium_may_be_arrays_of_one_number():
    class Rewarding(Echo):
        def step(self, action):
            return *super().step(action)[:1], np.array([2.5]), False, False, {}

    env = GymMazeEnv(Rewarding(spaces.Discrete(2)))
    env.reset()
    assert env.step({"action": 0})[1] == 2.5


class Overflowing(gymnasium.Env):
    """An observation of another dtype than its space, which the dtype of the space cannot hold in the 30th step."""

    observation_space = spaces.Box(0, 255, (2,), np.uint8)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.n_steps = 0
        return np.array([7, 200]), {}

    def step(self, action):
        self.n_steps += 1
        return np.array([7, 300 if self.n_steps == 30 else 200]), 1.0, False, False, {}


@pytest.mark.parametrize("algorithm", ["ppo", "sac", "dqn"])
def test_an_integer_that_wraps_around_ends_a_run_with_its_place(algorithm, tmp_path):
    small = {
        "ppo": {"algorithm.n_rollout_steps": 20, "algorithm.epoch_length": 2},
        "sac": {"algorithm.epoch_length": 10, "algorithm.initial_buffer_size": 20, "algorithm.replay_buffer_size": 60},
        "dqn": {"algorithm.epoch_length": 100, "algorithm.initial_buffer_size": 20, "algorithm.replay_buffer_size": 60},
    }
    context = RunContext(
        env=Overflowing, algorithm=algorithm, run_dir=tmp_path, overrides=small[algorithm], silent=True
    )
    with pytest.raises(
        EnvironmentContractError, match=r"Overflowing, observation `observation`: .* uint8, .*found .*300"
    ):
        context.train(n_epochs=2)


class Short(gymnasium.Env):
    observation_space = spaces.Box(0, 1, (2,), np.float32)
    action_space = spaces.MultiBinary(1)

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False


def test_a_step_with_too_few_values_names_the_environment():
    env = GymMazeEnv(Short())
    env.reset()
    with pytest.raises(EnvironmentContractError, match=r"Short: expected five values from `step`.*found 3"):
        env.step(env.action_space.sample())
