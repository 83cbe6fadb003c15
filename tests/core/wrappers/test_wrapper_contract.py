"""What every wrapper of the package must do, checked for each of them."""

from __future__ import annotations

import copy
import importlib
import pickle
import pkgutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import maze.core.wrappers
from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.base_env import is_truncated
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_generator import RolloutGenerator
from maze.core.wrappers.dict_action_wrapper import DictActionWrapper
from maze.core.wrappers.dict_observation_wrapper import DictObservationWrapper
from maze.core.wrappers.discretize_actions_wrapper import DiscretizeActionsWrapper
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymCoreEnv, GymMazeEnv
from maze.core.wrappers.monitoring_wrapper import MazeEnvMonitoringWrapper, StepTimingWrapper
from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper
from maze.core.wrappers.no_dict_observation_wrapper import NoDictObservationWrapper
from maze.core.wrappers.no_dict_spaces_wrapper import NoDictSpacesWrapper
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)
from maze.core.wrappers.observation_preprocessing.preprocessing_wrapper import PreProcessingWrapper
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.observation_visualization_wrapper import ObservationVisualizationWrapper
from maze.core.wrappers.random_reset_wrapper import RandomResetWrapper, StepSkipWrapper
from maze.core.wrappers.return_normalization_reward_wrapper import ReturnNormalizationRewardWrapper
from maze.core.wrappers.reward_clipping_wrapper import RewardClippingWrapper
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.sorted_spaces_wrapper import SortedSpacesWrapper
from maze.core.wrappers.split_actions_wrapper import SplitActionsWrapper
from maze.core.wrappers.time_limit_wrapper import CallTimeLimitWrapper, TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import (
    ActionRecordingWrapper,
    FrameRecordingWrapper,
    ParquetRecordingWrapper,
    TrajectoryRecordingWrapper,
)
from maze.core.wrappers.wrapper import Wrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from tests.core.env.tutorial_cutting import StructuredCuttingEnv, cutting_env_factory
from tests.core.wrappers.zoo_env import SimpleEnv, no_plot, simple, with_dict_actions, with_dict_observations, zoo

PREPROCESSORS = [
    {"observation": "image", "_target_": "maze.preprocessors.Rgb2GrayPreProcessor", "config": {"rgb_dim": -1}},
    {
        "observation": "image-rgb2gray",
        "_target_": "maze.preprocessors.ResizeImgPreProcessor",
        "keep_original": True,
        "config": {"target_size": [3, 5], "transpose": False},
    },
    {
        "observation": "image-rgb2gray-resize_img",
        "_target_": "maze.preprocessors.UnSqueezePreProcessor",
        "config": {"dim": -3},
    },
    {"observation": "category", "_target_": "maze.preprocessors.OneHotPreProcessor", "config": {}},
]
STRATEGIES = "maze.normalization_strategies."
NORMALIZATION = {
    "default_strategy": STRATEGIES + "MeanZeroStdOneObservationNormalizationStrategy",
    "default_strategy_config": {"clip_range": [-3, 3], "axis": None},
    "default_statistics": {"mean": 0.5, "std": 2.0},
    "statistics_dump": "no_such_file.pkl",
    "sampling_policy": {"_target_": "maze.core.agent.random_policy.RandomPolicy"},
    "exclude": None,
    "manual_config": None,
}


@dataclass
class Case:
    """A wrapper in one configuration."""

    wrapper: type[Wrapper[Any]]
    arguments: dict[str, Any] = field(default_factory=dict)
    base: Any = zoo
    is_around_gym: bool = False
    """Works around gymnasium environments; the Maze environment is outside."""
    changes_time: bool = False
    """Takes steps by itself: actions cannot be replayed one by one."""
    has_no_dictionaries: bool = False
    name: str = ""

    def make(self, length: int = 6, ends: str = "terminated") -> Any:
        env = self.base(length, ends)
        return env if self.is_around_gym else self.wrapper.wrap(env, **copy.deepcopy(self.arguments))

    def __str__(self) -> str:
        return self.wrapper.__name__ + (f"-{self.name}" if self.name else "")


PARQUET = [Case(ParquetRecordingWrapper)] if find_spec("pyarrow") is not None else []
CASES = [
    Case(ActionRecordingWrapper),
    Case(DictActionWrapper, base=with_dict_actions, is_around_gym=True),
    Case(DictObservationWrapper, base=with_dict_observations, is_around_gym=True),
    Case(DiscretizeActionsWrapper, {"discretization_config": {"force": {"num_actions": [3, 5]}}}),
    Case(FrameRecordingWrapper),
    Case(LogStatsWrapper),
    Case(MazeEnvMonitoringWrapper, dict.fromkeys(("observation_logging", "action_logging", "reward_logging"), True)),
    Case(NoDictActionWrapper, base=simple, has_no_dictionaries=True),
    Case(NoDictObservationWrapper, base=simple, has_no_dictionaries=True),
    Case(NoDictSpacesWrapper, base=simple, has_no_dictionaries=True),
    Case(ObservationNormalizationWrapper, NORMALIZATION),
    Case(ObservationStackWrapper, {"stack_config": [{"observation": "vector", "stack_steps": 3}]}),
    Case(
        ObservationStackWrapper,
        {
            "stack_config": [
                {"observation": "image", "stack_steps": 2, "tag": "delta", "keep_original": True, "delta": True}
            ]
        },
        name="delta",
    ),
    Case(ObservationVisualizationWrapper, {"plot_function": f"{no_plot.__module__}.no_plot"}),
    Case(PreProcessingWrapper, {"pre_processor_mapping": PREPROCESSORS}),
    Case(RandomResetWrapper, {"min_skip_steps": 1, "max_skip_steps": 2}, changes_time=True),
    Case(ReturnNormalizationRewardWrapper, {"gamma": 0.9, "epsilon": 1e-8}),
    Case(RewardClippingWrapper, {"min_val": -1.0, "max_val": 1.0}),
    Case(RewardScalingWrapper, {"scale": 0.1}),
    Case(SortedSpacesWrapper),
    *PARQUET,
    Case(
        SplitActionsWrapper,
        {
            "split_config": {
                "force": {"up": {"indices": [1]}, "right": {"indices": [0]}},
                "levels": {"first": {"indices": [0]}, "second": {"indices": [1]}},
            }
        },
    ),
    Case(StepSkipWrapper, {"n_steps": 2}, changes_time=True),
    Case(StepTimingWrapper),
    Case(TimeLimitWrapper, {"max_episode_steps": 100}),
    Case(CallTimeLimitWrapper, {"seconds": 60}),
    Case(TrajectoryRecordingWrapper),
]
every_wrapper = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some wrappers write files


def test_the_contract_covers_every_wrapper_of_the_package():
    found = set()
    for module in pkgutil.walk_packages(maze.core.wrappers.__path__, "maze.core.wrappers."):
        for member in vars(importlib.import_module(module.name)).values():
            is_wrapper = isinstance(member, type) and issubclass(member, Wrapper) and not issubclass(member, MazeEnv)
            if is_wrapper and member.__module__ == module.name and not getattr(member, "__abstractmethods__", None):
                found.add(member)
    helpers = {klass for klass in found if klass.__module__ == Wrapper.__module__ or klass.__name__.startswith("_")}
    if not PARQUET:
        helpers.add(ParquetRecordingWrapper)
    assert found - helpers == {case.wrapper for case in CASES}


def in_space(space: spaces.Space, value: Any) -> bool:
    if isinstance(space, spaces.Dict):
        return value.keys() == space.keys() and all(in_space(space[key], value[key]) for key in space)
    if isinstance(space, spaces.Box):
        assert np.asarray(value).dtype == space.dtype
    return space.contains(np.asarray(value))


def plain(value: Any) -> Any:
    """Comparable by ``==``."""
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in sorted(value.items())}
    return np.asarray(value).tolist()


def without_timing(info: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in info.items() if key == "TimeLimit.truncated"}


def play(env: Any, n_steps: int, actions: list[Any] | None = None) -> tuple[list[Any], list[Any]]:
    """Steps the environment, with sampled actions where none are given; returns what happened, and the actions."""
    trace, taken = [], []
    for index in range(n_steps):
        action = env.action_space.sample() if actions is None else actions[index]
        observation, reward, done, info = env.step(action)
        trace.append((plain(observation), reward, done, without_timing(info)))
        taken.append(action)
        if done:
            trace.append(plain(env.reset()))
    return trace, taken


def seeded(case: Case, seed: int = 7, **arguments: Any) -> Any:
    env = case.make(**arguments)
    env.seed(seed)
    env.reset()
    return env


@every_wrapper
def test_observations_are_elements_of_the_observation_space(case):
    env = case.make()
    env.seed(3)
    observation = env.reset()
    for _ in range(20):
        step_key = env.actor_id().step_key
        assert env.observation_space == env.observation_spaces_dict[step_key]
        assert env.action_space == env.action_spaces_dict[step_key]
        assert in_space(env.observation_space, observation)
        action = env.action_space.sample()
        assert env.action_space.contains(action)
        observation, reward, done, info = env.step(action)
        assert isinstance(reward, float)
        assert isinstance(done, bool)
        assert isinstance(info, dict)
        if done:
            assert in_space(env.observation_space, observation)
            observation = env.reset()


@every_wrapper
def test_the_same_seed_gives_the_same_episodes_and_sampled_actions(case):
    def episodes(env: Any, seed: int) -> list[Any]:
        env.seed(seed)
        return [plain(env.reset()), *play(env, 15)[0]]

    env = case.make()
    first = episodes(env, 5)
    # Statistics of rewards go on being learned; everything else starts again.
    again = case.make() if case.wrapper is ReturnNormalizationRewardWrapper else env
    assert episodes(again, 5) == first
    assert episodes(case.make(), 5) == first
    assert episodes(case.make(), 6) != first


@every_wrapper
@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_the_end_of_an_episode_and_its_reason_pass_through(case, ends):
    env = seeded(case, ends=ends)
    n_episodes = 0
    while n_episodes < 3:
        _, _, done, info = env.step(env.action_space.sample())
        if done:
            assert is_truncated(done, info) is (ends == "truncated")
            n_episodes += 1
            env.reset()


@every_wrapper
def test_clone_continues_like_the_original_and_independently(case):
    original, clone = seeded(case), seeded(case, seed=8)
    play(original, 2)
    clone.clone_from(original)
    trace, actions = play(original, 9)
    assert play(clone, 9, actions)[0] == trace


@every_wrapper
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_copy_continues_like_the_original_and_independently(case, copied):
    original = seeded(case)
    play(original, 2)
    duplicate = copied(original)
    assert type(duplicate) is type(original)
    trace, actions = play(original, 9)
    assert play(duplicate, 9, actions)[0] == trace
    assert duplicate.core_env is not original.core_env
    assert duplicate.context is duplicate.core_env.context


@every_wrapper
def test_recorded_states_and_actions_convert_to_what_the_agent_saw_and_did(case):
    env, converter = seeded(case), case.make()
    observation, is_first = None, True
    env.seed(11)
    observation = env.reset()
    for _ in range(12):
        state = copy.deepcopy(env.get_maze_state())
        action = env.action_space.sample()
        next_observation, _, done, _ = env.step(action)
        observations, actions = converter.get_observation_and_action_dicts(state, env.get_maze_action(), is_first)
        assert plain(observations[0]) == plain(observation)
        assert in_space(converter.observation_spaces_dict[0], observations[0])
        np.testing.assert_equal(plain(actions[0]), plain(action))
        observation, is_first = (env.reset(), True) if done else (next_observation, False)


@every_wrapper
def test_missing_states_and_actions_are_not_converted(case):
    env = seeded(case)
    play(env, 1)
    assert env.get_observation_and_action_dicts(None, env.get_maze_action(), True)[0] is None
    assert env.get_observation_and_action_dicts(env.get_maze_state(), None, True)[1] is None


@every_wrapper
def test_converting_leaves_the_running_episode_alone(case):
    env, undisturbed = seeded(case), seeded(case)
    _, actions = play(env, 1)
    play(undisturbed, 1, actions)
    env.get_observation_and_action_dicts(env.get_maze_state(), env.get_maze_action(), True)
    trace, actions = play(env, 4)
    assert play(undisturbed, 4, actions)[0] == trace


@every_wrapper
def test_the_environment_is_seen_through_the_wrapper(case):
    env = seeded(case)
    for seen in (GymMazeEnv, MazeEnv, GymCoreEnv, *(() if case.is_around_gym else (case.wrapper, Wrapper))):
        assert isinstance(env, seen)
    assert not isinstance(env, gymnasium.Env)
    assert env.get_env_time() == env.context.step_id
    assert env.agent_counts_dict == {0: 1}
    with pytest.raises(AttributeError, match="no_such_attribute"):
        env.no_such_attribute
    if not case.is_around_gym:
        assert type(env) is case.wrapper


@every_wrapper
def test_an_exchanged_environment_is_used(case):
    """As deployment does it: the innermost environment of a stack is replaced by another one."""
    if case.is_around_gym:
        pytest.skip("the Maze environment is outside")
    env = seeded(case)
    inner = env
    while issubclass(type(inner.env), Wrapper):
        inner = inner.env
    other = seeded(Case(TimeLimitWrapper, base=case.base), seed=99).core_env
    assert type(inner) is GymMazeEnv
    other.context = inner.context
    inner.core_env = other
    play(env, 2)
    assert env.core_env is other


@every_wrapper
def test_short_name_and_full_path_configure_the_same_wrapper(case):
    path = f"{case.wrapper.__module__}.{case.wrapper.__qualname__}"
    base = SimpleEnv if case.is_around_gym else case.base
    for name in (case.wrapper.__name__, path, case.wrapper):
        env = WrapperFactory.wrap_from_config(base(), {name: copy.deepcopy(case.arguments)})
        assert type(env) is case.wrapper
    with pytest.raises(ConfigError, match="no_such_argument"):
        WrapperFactory.wrap_from_config(base(), {path: {**case.arguments, "no_such_argument": 1}})


def test_short_names_are_known_before_anything_was_imported_and_import_no_torch():
    names = [case.wrapper.__name__ for case in CASES]
    code = (
        "import sys; from maze.core.wrappers.wrapper_factory import WrapperFactory; factory = WrapperFactory();"
        f"assert all(factory.type_from_name(name).__name__ == name for name in {names});"
        "assert not {'torch', 'matplotlib', 'pandas', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("case", [case for case in CASES if not case.is_around_gym], ids=str)
def test_wrappers_are_applied_in_the_order_of_the_configuration(case):
    clip = {"RewardClippingWrapper": {"min_val": -9.0, "max_val": 9.0}}
    own = {case.wrapper: copy.deepcopy(case.arguments)}
    env = WrapperFactory.wrap_from_config(case.base(), [own, clip])
    assert [type(env), type(env.env)][1] in (case.wrapper, *_probes())
    assert type(env) is RewardClippingWrapper
    env = WrapperFactory.wrap_from_config(case.base(), [clip, own])
    assert type(env) is case.wrapper
    env.seed(1)
    env.reset()
    play(env, 8)


def _probes() -> list[type]:
    return [klass for klass in Wrapper.__subclasses__() if klass.__name__.startswith("_")]


def collected(vector_env: Any, n_steps: int) -> Any:
    try:
        vector_env.seed([1, 2])
        generator = RolloutGenerator(vector_env)
        policy = RandomPolicy(vector_env.action_spaces_dict)
        policy.seed(3)
        columns = generator.collect(policy, generator.allocate(n_steps))
        substeps = columns.substeps[0]
        observations = {key: array.tolist() for key, array in substeps.observations.items()}
        return observations, columns.rewards.tolist(), columns.truncated.tolist(), columns.terminated.tolist()
    finally:
        vector_env.close()


@pytest.mark.parametrize("case", [case for case in CASES if not case.has_no_dictionaries], ids=str)
def test_vector_environments_give_the_same_rollouts_in_process_and_in_workers(case):
    expected = collected(SequentialVectorEnv([case.make, case.make]), 10)
    assert collected(SubprocVectorEnv([case.make, case.make], n_workers=1), 10) == expected


STRUCTURED = [
    Case(LogStatsWrapper),
    Case(MazeEnvMonitoringWrapper, dict.fromkeys(("observation_logging", "action_logging", "reward_logging"), True)),
    Case(ObservationNormalizationWrapper, NORMALIZATION),
    Case(ObservationStackWrapper, {"stack_config": [{"observation": "ordered_piece", "stack_steps": 2}]}),
    Case(
        PreProcessingWrapper,
        {
            "pre_processor_mapping": [
                {
                    "observation": "inventory",
                    "_target_": "maze.preprocessors.FlattenPreProcessor",
                    "config": {"num_flatten_dims": 2},
                }
            ]
        },
    ),
    Case(RandomResetWrapper, {"min_skip_steps": 1, "max_skip_steps": 2}),
    Case(ReturnNormalizationRewardWrapper, {"gamma": 0.9, "epsilon": 1e-8}),
    Case(RewardClippingWrapper, {"min_val": -0.5, "max_val": 1.0}),
    Case(RewardScalingWrapper, {"scale": 0.1}),
    Case(SortedSpacesWrapper),
    *PARQUET,
    Case(StepTimingWrapper),
    Case(TimeLimitWrapper, {"max_episode_steps": 3}),
    Case(TrajectoryRecordingWrapper),
]


def structured(length: int = 0, ends: str = "") -> Any:
    return TimeLimitWrapper.wrap(StructuredCuttingEnv(cutting_env_factory()), max_episode_steps=5)


@pytest.mark.parametrize("case", STRUCTURED, ids=str)
def test_sub_steps_pass_through_with_their_own_spaces(case):
    case.base = structured
    env = case.make()
    env.seed(1)
    observation = env.reset()
    expected = 0
    for _ in range(25):
        step_key = env.actor_id().step_key
        assert step_key == expected
        assert in_space(env.observation_space, observation)
        assert in_space(env.observation_spaces_dict[step_key], observation)
        observation, reward, done, _ = env.step(env.action_space.sample())
        assert isinstance(reward, float)
        expected = 0 if done else 1 - step_key
        if done:
            observation = env.reset()


@pytest.mark.parametrize("case", STRUCTURED, ids=str)
def test_structured_states_convert_to_what_the_actors_saw_and_did(case):
    case.base = structured
    env, converter = case.make(), case.make()
    observation = {0: env.reset()}
    is_first = True
    for _ in range(3):
        state = copy.deepcopy(env.get_maze_state())
        action = {0: {"piece_idx": 0}, 1: {"cut_rotation": 1}}
        observation[1] = env.step(action[0])[0]
        next_observation = env.step(action[1])[0]
        observations, actions = converter.get_observation_and_action_dicts(state, env.get_maze_action(), is_first)
        assert plain(observations) == plain(observation)
        assert plain(actions) == plain(action)
        observation, is_first = {0: next_observation}, False
