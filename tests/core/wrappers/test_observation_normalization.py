"""Normalization of observations: strategies, statistics, their estimation and their file."""

from __future__ import annotations

import copy
import os
import pickle
import types
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maze.core.agent.random_policy import RandomPolicy
from maze.core.errors import CheckpointError, ConfigError
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.core.wrappers.observation_normalization.observation_normalization_utils import (
    estimate_observation_normalization_statistics,
    make_normalized_env_factory,
    obtain_normalization_statistics,
)
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
    estimated_statistics,
)
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import ObservationWrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.normalization_strategies import (
    MeanZeroStdOneObservationNormalizationStrategy,
    ObservationNormalizationStrategy,
    RangeZeroOneObservationNormalizationStrategy,
)
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.core.wrappers.zoo_env import simple, zoo

MEAN_STD = "maze.normalization_strategies.MeanZeroStdOneObservationNormalizationStrategy"
RANGE = "maze.normalization_strategies.RangeZeroOneObservationNormalizationStrategy"
RANDOM = {"_target_": "maze.core.agent.random_policy.RandomPolicy"}


def config(**changes):
    documented = {
        "default_strategy": MEAN_STD,
        "default_strategy_config": {"clip_range": [None, None], "axis": None},
        "default_statistics": None,
        "statistics_dump": "statistics.pkl",
        "sampling_policy": RANDOM,
        "exclude": None,
        "manual_config": None,
    }
    return {**documented, **changes}


def normalized(env=None, **changes):
    return ObservationNormalizationWrapper.wrap(zoo() if env is None else env, **config(**changes))


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Halving(ObservationNormalizationStrategy):
    """A strategy of a user."""

    def estimate_stats(self, observations):
        return {"divisor": np.array(2.0)}

    def normalize_value(self, value):
        return value / self._statistics["divisor"]


def mean_std(shape=(2,), clip_range=(None, None), axis=0, dtype=np.float32):
    space = spaces.Box(-100, 100, shape, dtype)
    return MeanZeroStdOneObservationNormalizationStrategy(space, clip_range, axis)


def test_mean_and_deviation_of_each_entry():
    strategy = mean_std()
    statistics = strategy.estimate_stats([np.array([0.0, 1.0]), np.array([2.0, 1.0]), np.array([4.0, 4.0])])
    assert statistics["mean"].tolist() == [2.0, 2.0]
    np.testing.assert_allclose(statistics["std"], np.sqrt([8 / 3, 2.0]))
    strategy.set_statistics(statistics)
    np.testing.assert_allclose(strategy.normalize_and_process_value([2.0, 2.0 + np.sqrt(2.0)]), [0.0, 1.0], atol=1e-6)


def test_one_mean_of_everything_without_an_axis():
    statistics = mean_std(axis=None).estimate_stats([np.array([0.0, 2.0]), np.array([0.0, 6.0])])
    assert statistics["mean"].shape == ()
    assert statistics["mean"] == 2.0
    np.testing.assert_allclose(statistics["std"], np.sqrt(6.0))


def test_statistics_of_image_channels_fit_the_image():
    images = list(np.random.default_rng(0).uniform(0, 255, (20, 5, 4, 3)))
    strategy = mean_std(shape=(5, 4, 3), axis=[0, 1, 2])
    strategy.set_statistics(strategy.estimate_stats(images))
    result = np.stack([strategy.normalize_and_process_value(image) for image in images])
    np.testing.assert_allclose(result.mean(axis=(0, 1, 2)), 0.0, atol=1e-5)
    np.testing.assert_allclose(result.std(axis=(0, 1, 2)), 1.0, atol=1e-5)


def test_statistics_over_a_later_axis_are_applied_along_the_right_one():
    samples = list(np.random.default_rng(0).normal(size=(50, 3, 3)) * np.array([[1.0], [10.0], [20.0]]))
    strategy = mean_std(shape=(3, 3), axis=[0, 2])
    strategy.set_statistics(strategy.estimate_stats(samples))
    result = np.stack([strategy.normalize_and_process_value(sample) for sample in samples])
    np.testing.assert_allclose(result.std(axis=(0, 2)), 1.0, atol=1e-5)


def test_samples_are_processed_in_parts_with_the_same_result(monkeypatch):
    samples = list(np.random.default_rng(0).normal(3.0, 2.0, (100, 7)))
    for strategy in (
        mean_std(shape=(7,)),
        RangeZeroOneObservationNormalizationStrategy(spaces.Box(0, 1, (7,)), (0, 1), 0),
    ):
        whole = strategy.estimate_stats(samples)
        monkeypatch.setattr(
            "maze.core.wrappers.observation_normalization.normalization_strategies.base._CHUNK_BYTES", 1000
        )
        for name, value in strategy.estimate_stats(samples).items():
            np.testing.assert_allclose(value, whole[name], rtol=1e-12)
        monkeypatch.undo()


@given(constant=st.floats(-1e6, 1e6), n=st.integers(1, 20))
def test_constant_observations_are_not_blown_up(constant, n):
    strategy = mean_std(shape=(1,))
    strategy.set_statistics(strategy.estimate_stats([np.array([constant], np.float32)] * n))
    assert abs(strategy.normalize_and_process_value(np.array([constant], np.float32))).max() < 1.0
    assert strategy.get_statistics()["std"] == 1.0


def test_small_differences_of_large_numbers_survive_in_double_precision():
    strategy = mean_std(shape=(1,), dtype=np.float64)
    samples = [np.array([1.7e9 + step]) for step in range(10)]
    strategy.set_statistics(strategy.estimate_stats(samples))
    differences = np.diff([strategy.normalize_and_process_value(sample).item() for sample in samples])
    np.testing.assert_allclose(differences, differences[0], rtol=1e-4)


def test_range_maps_the_extremes_to_zero_and_one_and_clips_beyond():
    strategy = RangeZeroOneObservationNormalizationStrategy(spaces.Box(0, 255, (2,), np.uint8), (0, 1), None)
    strategy.set_statistics(strategy.estimate_stats([np.array([10, 20]), np.array([30, 15])]))
    assert strategy.normalize_and_process_value(np.array([10, 20], np.uint8)).tolist() == [0.0, 0.5]
    assert strategy.normalize_and_process_value(np.array([0, 255], np.uint8)).tolist() == [0.0, 1.0]
    assert strategy.normalized_space() == spaces.Box(0, 1, (2,))


@given(
    value=st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=2),
    mean=st.floats(-50, 50),
    std=st.floats(0.01, 50),
    clip=st.sampled_from([(None, None), (-3, 3), (0, None)]),
)
def test_normalized_values_are_elements_of_the_normalized_space(value, mean, std, clip):
    strategy = mean_std(clip_range=clip)
    assert not strategy.is_initialized()
    assert strategy.normalized_space().shape == (2,)
    strategy.set_statistics({"mean": mean, "std": [std, 2 * std]})
    assert strategy.normalized_space().contains(strategy.normalize_and_process_value(np.array(value, np.float32)))


def samples_of(dtype):
    """A few samples of two entries: numbers of any size, close to each other or not, and constants."""
    width = 32 if dtype == np.float32 else 64
    limit = float(np.float32(1e37)) if dtype == np.float32 else 1e140
    anything = st.floats(-limit, limit, width=width, allow_subnormal=False)
    near = st.tuples(st.sampled_from([0.0, 2.0**24, 1.7e9, 2.0**53, -1e17]), st.integers(-500, 500)).map(sum)
    entry = st.one_of(st.lists(anything, min_size=4, max_size=4), st.lists(near, min_size=4, max_size=4))
    constant = st.one_of(anything, near).map(lambda value: [value] * 4)
    entries = st.one_of(entry, constant)
    return st.tuples(entries, entries).map(lambda pair: list(np.array(pair, dtype).T))


EITHER_STRATEGY = pytest.mark.parametrize(
    "strategy_type",
    [MeanZeroStdOneObservationNormalizationStrategy, RangeZeroOneObservationNormalizationStrategy],
)
ANY_TYPE = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@EITHER_STRATEGY
@ANY_TYPE
@pytest.mark.parametrize("axis", [0, None])
@settings(max_examples=50)
@given(data=st.data())
def test_generated_samples_are_normalized(strategy_type, dtype, axis, data):
    samples = data.draw(samples_of(dtype))
    space = spaces.Box(-np.inf, np.inf, (2,), dtype)
    strategy = strategy_type(space, (None, None), axis)
    strategy.set_statistics(strategy.estimate_stats(samples))
    result = np.stack([strategy.normalize_and_process_value(sample) for sample in samples])
    assert np.isfinite(result).all()
    groups = zip(np.array(samples).T, result.T, strict=True) if axis == 0 else [(np.array(samples), result)]
    for observed, values in groups:
        if (observed == observed.flat[0]).all():
            assert (values == 0).all()
        elif strategy_type is RangeZeroOneObservationNormalizationStrategy:
            assert (values.min(), values.max()) == (0, pytest.approx(1, abs=1e-4))
        elif observed.std(dtype=np.float64) > 1e-6 * abs(observed.mean(dtype=np.float64)):
            assert abs(values.mean(dtype=np.float64)) < 1e-4
            assert values.std(dtype=np.float64) == pytest.approx(1, abs=1e-4)


@EITHER_STRATEGY
@ANY_TYPE
@settings(max_examples=50)
@given(data=st.data(), given_type=st.sampled_from([np.float32, np.float64]))
def test_statistics_come_back_as_they_were_given_and_survive_their_file(strategy_type, dtype, data, given_type):
    estimated = strategy_type(spaces.Box(-np.inf, np.inf, (2,), dtype), (None, None), 0)
    samples = data.draw(samples_of(dtype))
    given_statistics = estimated.estimate_stats(samples)
    if given_type == np.float32:
        given_statistics = {
            name: np.clip(value, -1e37, 1e37).astype(np.float32) for name, value in given_statistics.items()
        }
        assume(given_statistics.get("std", np.ones(1)).all())
    estimated.set_statistics(given_statistics)
    pickled = pickle.loads(pickle.dumps(estimated.get_statistics()))
    restored = strategy_type(spaces.Box(-np.inf, np.inf, (2,), dtype), (None, None), 0)
    restored.set_statistics(pickled)  # what a statistics file of its own makes, it reads
    for strategy in (estimated, restored):
        for name, value in given_statistics.items():
            assert strategy.get_statistics()[name].dtype == given_type
            np.testing.assert_array_equal(strategy.get_statistics()[name], value)
    with np.errstate(over="ignore"):  # far beyond statistics that were cut off
        for sample in samples:
            np.testing.assert_array_equal(
                restored.normalize_and_process_value(sample), estimated.normalize_and_process_value(sample)
            )


def test_statistics_do_not_change_with_the_array_that_they_were_given_in():
    mean = np.zeros(2)
    strategy = mean_std()
    strategy.set_statistics({"mean": mean, "std": np.ones(2)})
    mean += 1
    assert strategy.get_statistics()["mean"].tolist() == [0, 0]


def test_a_constant_time_stamp_does_not_spoil_the_statistics_file():
    ranged = config(default_strategy=RANGE, default_strategy_config={"clip_range": [None, None], "axis": 0})

    class Stamped(ObservationWrapper):
        def observation(self, observation):
            return {**observation, "vector": np.full_like(observation["vector"], 1_700_000_000)}

    env = ObservationNormalizationWrapper.wrap(Stamped(zoo()), **ranged)
    obtain_normalization_statistics(env, n_samples=20)
    again = ObservationNormalizationWrapper.wrap(Stamped(zoo()), **ranged)
    assert again.get_statistics()
    assert (again.reset()["vector"] == 0).all()


@pytest.mark.parametrize(
    ("statistics", "message"),
    [
        ({"mean": 0.0}, "std"),
        ({"mean": 0.0, "std": 0.0}, "positive"),
        ({"mean": [1.0, 2.0, 3.0], "std": 1.0}, "shape"),
        ({"mean": np.nan, "std": 1.0}, "finite numbers"),
        ({"mean": "high", "std": 1.0}, "finite numbers"),
    ],
)
def test_statistics_that_cannot_be_right_are_refused(statistics, message):
    with pytest.raises(ConfigError, match=message):
        mean_std().set_statistics(statistics)


@pytest.mark.parametrize("axis", [1, [1], 2, "0"])
def test_axes_must_contain_that_of_the_samples(axis):
    with pytest.raises(ConfigError, match="axis"):
        mean_std(axis=axis)


def test_estimated_statistics_give_mean_zero_and_deviation_one_where_they_were_taken():
    env = normalized(default_strategy_config={"clip_range": [None, None], "axis": 0})
    env.seed(4)
    statistics = obtain_normalization_statistics(env, n_samples=500)
    assert set(statistics) == {"vector", "image"}
    samples = []
    env.seed(4)
    policy = env.build_sampling_policy(env.action_spaces_dict)
    observation = env.reset()
    for _ in range(500):
        observation, _, done, _ = env.step(policy.compute_action(observation))
        samples.append(observation["vector"])
        if done:
            observation = env.reset()
            samples.append(observation["vector"])
    np.testing.assert_allclose(np.mean(samples, axis=0), 0.0, atol=0.05)
    np.testing.assert_allclose(np.std(samples, axis=0), 1.0, atol=0.05)


def test_masks_and_categories_are_never_normalized():
    env = normalized(default_statistics={"mean": 10.0, "std": 0.1})
    observation = env.reset()
    assert observation["action_mask"].tolist() == [1.0, 1.0]
    assert observation["category"] in env.observation_space["category"]
    assert observation["vector"].max() < -10
    for name in ("action_mask", "category"):
        with pytest.raises(ConfigError, match=name):
            normalized(manual_config={name: {"statistics": {"mean": 0.0, "std": 1.0}}})


def test_documented_manual_configuration_and_exclusion():
    env = normalized(
        default_strategy_config={"clip_range": [None, None], "axis": None},
        exclude=["action_mask"],
        manual_config={
            "image": {
                "strategy": RANGE,
                "strategy_config": {"clip_range": [0, 1], "axis": None},
                "statistics": {"min": 0, "max": 255},
            },
            "vector": {"strategy": MEAN_STD, "strategy_config": {"clip_range": [-3, 3], "axis": [0]}},
        },
    )
    assert env.names_to_estimate() == ["vector"]
    statistics = obtain_normalization_statistics(env, n_samples=50)
    assert statistics["image"]["max"] == 255
    assert statistics["vector"]["mean"].shape == (3,)
    assert env.observation_space["image"] == spaces.Box(0, 1, (6, 4, 3))
    assert env.observation_space["vector"].high.max() <= 3


def test_excluded_observations_stay_as_they_are():
    env = normalized(default_statistics={"mean": 10.0, "std": 0.1}, exclude=["vector"])
    assert abs(env.reset()["vector"]).max() <= 1
    assert env.observation_space["vector"] == zoo().observation_space["vector"]


def test_nothing_is_sampled_where_all_statistics_are_configured():
    env = normalized(default_statistics={"mean": 0.0, "std": 1.0}, sampling_policy=None)
    assert env.get_statistics()
    assert obtain_normalization_statistics(env, n_samples=10)["vector"]["std"] == 1.0


def test_environments_without_the_wrapper_have_no_statistics():
    assert obtain_normalization_statistics(zoo(), n_samples=10) is None
    assert make_normalized_env_factory(zoo, None) is zoo


def test_documented_python_example():
    env = GymMazeEnv("CartPole-v1")
    settings = config(
        default_strategy_config={"clip_range": (None, None), "axis": 0},
        sampling_policy=RandomPolicy(env.action_spaces_dict),
    )
    env = ObservationNormalizationWrapper.wrap(env, **settings)
    statistics = obtain_normalization_statistics(env, n_samples=1000)
    training_env = ObservationNormalizationWrapper.wrap(GymMazeEnv("CartPole-v1"), **settings)
    training_env.set_normalization_statistics(statistics)
    training_env.seed(1)
    observation = training_env.reset()["observation"]
    expected = (training_env.get_maze_state() - statistics["observation"]["mean"]) / statistics["observation"]["std"]
    np.testing.assert_allclose(observation, expected, rtol=1e-5)
    assert observation.dtype == np.float32


def test_the_same_seed_gives_the_same_statistics():
    def estimate(seed):
        env = normalized(simple(), statistics_dump=None)
        env.seed(seed)
        return obtain_normalization_statistics(env, n_samples=100)["observation"]["mean"].tobytes()

    assert estimate(3) == estimate(3) != estimate(4)


def test_a_policy_that_reads_observations_receives_the_unwrapped_ones():
    class Looking(RandomPolicy):
        seen = []

        def compute_action(self, observation, **kwargs):
            self.seen.append(float(abs(observation["observation"]).max()))
            return super().compute_action(observation, **kwargs)

    inner = simple()
    env = normalized(inner, sampling_policy=Looking(inner.action_spaces_dict))
    env.set_normalization_statistics({"observation": {"mean": 1000.0, "std": 1.0}})
    estimate_observation_normalization_statistics(env, 20)
    assert len(Looking.seen) == 20
    assert max(Looking.seen) <= 5


def test_outer_wrappers_take_part_and_statistics_of_the_sampling_are_not_logged():
    env = NoDictSpacesWrapper(TimeLimitWrapper(normalized(simple(length=10**6)), max_episode_steps=2))
    obtain_normalization_statistics(env, n_samples=20)
    assert env.get_env_time() <= 2
    env = LogStatsWrapper.wrap(normalized(simple()))
    obtain_normalization_statistics(env, n_samples=20)
    env.epoch_stats.reduce()
    assert not env.epoch_stats.last_stats


def test_sub_steps_share_the_statistics_of_observations_of_the_same_name():
    env = normalized(TimeLimitWrapper(StructuredCuttingEnv(cutting_env_factory()), max_episode_steps=5))
    statistics = obtain_normalization_statistics(env, n_samples=50)
    assert list(statistics) == ["inventory", "ordered_piece", "selected_piece"]
    env.reset()
    assert env.step({"piece_idx": 0})[0]["selected_piece"].dtype == np.float32


def test_statistics_are_kept_in_the_file_and_used_by_the_next_environment():
    env = normalized(simple())
    statistics = obtain_normalization_statistics(env, n_samples=100)
    again = normalized(simple())
    assert again.get_statistics()
    for env_of_file in (env, again):
        env_of_file.seed(2)
    assert env.reset()["observation"].tobytes() == again.reset()["observation"].tobytes()
    factory = pickle.loads(pickle.dumps(make_normalized_env_factory(simple_normalized, statistics)))
    assert factory().get_statistics()["observation"]["mean"].tobytes() == statistics["observation"]["mean"].tobytes()


def simple_normalized():
    return normalized(simple(), statistics_dump="elsewhere.pkl")


def stacked_normalized():
    stack = {"observation": "observation", "stack_steps": 2}
    return ObservationStackWrapper.wrap(simple_normalized(), stack_config=[stack])


def test_wrappers_around_the_normalization_have_the_spaces_of_its_statistics():
    statistics, factory, env = estimated_statistics(stacked_normalized(), stacked_normalized, 50, None)
    Path("elsewhere.pkl").unlink()  # other machines do not have the file
    inner = simple_normalized()
    inner.set_normalization_statistics(statistics)
    high = inner.observation_space["observation"].high
    for each in (env, factory(), pickle.loads(pickle.dumps(factory))()):
        np.testing.assert_array_equal(each.observation_space["observation"].high, [high, high])
        assert each.get_statistics().keys() == statistics.keys()
    assert simple_normalized().names_to_estimate(), "the statistics hold for environments of the factory only"


def test_relative_files_refer_to_the_directory_in_which_the_wrapper_was_made(tmp_path):
    env = normalized(simple())
    (tmp_path / "other").mkdir()
    os.chdir(tmp_path / "other")
    obtain_normalization_statistics(env, n_samples=10)
    assert (tmp_path / "statistics.pkl").is_file()


def test_missing_statistics_raise_an_error_with_the_remedy(tmp_path):
    env = normalized(simple())
    with pytest.raises(CheckpointError, match=r"\['observation'\].*statistics.pkl.*input_dir"):
        env.reset()
    with pytest.raises(CheckpointError, match="no normalization statistics"):
        env.load_statistics(tmp_path / "nowhere.pkl")


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps({"other": {"mean": 0.0, "std": 1.0}}), "other"),
        (pickle.dumps({"observation": {"mean": np.zeros(7), "std": 1.0}}), "shape"),
        (pickle.dumps([1, 2]), "expected names"),
        (pickle.dumps({"observation": Malicious()}), "mkdir"),
        (b"", "readable pickle"),
        (b"<html>", "readable pickle"),
    ],
)
def test_a_file_that_does_not_fit_is_reported_where_it_is_needed_and_executes_nothing(tmp_path, content, message):
    (tmp_path / "statistics.pkl").write_bytes(content)
    env = normalized(simple())
    with pytest.raises(CheckpointError, match="none that fit"):
        env.reset()
    with pytest.raises(CheckpointError, match=message):
        env.load_statistics("statistics.pkl")
    obtain_normalization_statistics(env, n_samples=10)  # an estimation replaces it
    env.reset()
    assert not (tmp_path / "executed").exists()


def test_a_file_of_another_strategy_is_not_used_and_nothing_of_it_is_kept():
    obtain_normalization_statistics(normalized(), n_samples=50)
    env = normalized(manual_config={"image": {"strategy": Halving}})
    with pytest.raises(CheckpointError, match="'divisor'; found the statistics"):
        env.load_statistics("statistics.pkl")
    assert not any(strategy.is_initialized() for strategy in env.strategies.values())
    obtain_normalization_statistics(env, n_samples=50)
    assert env.reset()["image"].max() < 128


def test_own_strategies_are_named_by_path_class_or_registered_name():
    for strategy in (f"{__name__}.Halving", Halving):
        env = normalized(simple(), default_strategy=strategy)
        obtain_normalization_statistics(env, n_samples=5)
        env.reset()
        np.testing.assert_array_equal(
            env.observation({"observation": np.full(3, 4.0)})["observation"], np.full(3, 2.0, np.float32)
        )
    with pytest.raises(ConfigError, match="NewName"):
        normalized(simple(), default_strategy="NewName")
    module = types.ModuleType("my_strategies")
    module.NewName = type("NewName", (Halving,), {})
    ObservationNormalizationWrapper.register_new_observation_normalization_strategy(module)
    assert normalized(simple(), default_strategy="NewName")
    assert normalized(simple(), default_strategy="RangeZeroOneObservationNormalizationStrategy")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exclude": ["vektor"]}, "Did you mean `vector`"),
        ({"manual_config": {"vektor": {}}}, "Did you mean `vector`"),
        ({"manual_config": {"vector": {"statistic": {}}}}, "Did you mean `statistics`"),
        ({"default_strategy": "maze.normalization_strategies.MeanZero"}, "MeanZero"),
        ({"default_strategy": "builtins.dict"}, "Strategy"),
        ({"default_strategy_config": {"clip_range": [1, 0]}}, "ascend"),
        ({"default_strategy_config": {"clip": [0, 1]}}, "clip_range"),
    ],
)
def test_faults_in_the_configuration_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        normalized(**changes)


def test_samples_that_are_not_finite_are_named():
    class Broken(type(simple().core_env.env)):
        def _observation(self):
            return np.array([0.0, np.nan, 0.0], np.float32)

    env = normalized(GymMazeEnv(Broken()))
    with (
        pytest.raises(ConfigError, match="sample 0 of the observation `observation`"),
        pytest.warns(UserWarning, match="observation"),
    ):
        obtain_normalization_statistics(env, n_samples=5)


def test_a_second_normalization_of_the_same_environment_is_refused():
    with pytest.raises(ConfigError, match="has one already"):
        normalized(normalized())


def test_an_invalid_sampling_policy_is_refused_by_its_key():
    with pytest.raises(ConfigError, match="sampling_policy"):
        obtain_normalization_statistics(normalized(simple(), sampling_policy={"_target_": "builtins.dict"}), 5)


def test_documented_configuration_builds_the_wrapper():
    path = f"{ObservationNormalizationWrapper.__module__}.ObservationNormalizationWrapper"
    env = WrapperFactory.wrap_from_config(simple(), {path: config()})
    obtain_normalization_statistics(env, n_samples=10)
    assert copy.deepcopy(env).get_statistics().keys() == {"observation"}
