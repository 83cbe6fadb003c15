"""Wrappers as data: a bundle acts as the environment with its wrappers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from benchmarks.bundle_equality import raw_action
from maze.core.errors import EnvironmentContractError
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.reward_scaling_wrapper import RewardScalingWrapper
from maze.core.wrappers.wrapper import ActionWrapper, ObservationWrapper, Wrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.serve.bundle import PolicyBundle
from maze.serve.bundle_file import BundleError
from maze.serve.export import tapped
from maze.serve.wrappers_as_data import operations_of
from tests.serve.conftest import policy_for


class Shower(gymnasium.Env[Any, Any]):
    """Shows random numbers of many kinds, and takes actions of many kinds."""

    observation_space = spaces.Dict(
        {
            "image": spaces.Box(0, 255, (8, 6, 3), np.uint8),
            "numbers": spaces.Box(-1e9, 1e9, (3,), np.float64),
            "kind": spaces.Discrete(3, start=2),
            "flags": spaces.MultiBinary(2),
        }
    )
    action_space = spaces.Dict(
        {
            "force": spaces.Box(-0.1, 0.1, (2,), np.float64),
            "parts": spaces.MultiDiscrete([3, 2, 4], start=[1, 0, 2]),
            "buttons": spaces.MultiBinary(3),
            "gear": spaces.Discrete(3, start=-1),
        }
    )

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.n_steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.n_steps += 1
        return self._observation(), 1.0, self.n_steps == 25, False, {}

    def _observation(self) -> Any:
        return {**self.observation_space.sample(), "numbers": 1e8 + self.np_random.normal(size=3)}


def pre(observation: str, name: str, **config: Any) -> dict[str, Any]:
    target = {"observation": observation, "_target_": f"maze.preprocessors.{name}PreProcessor", "config": config}
    return {**target, "keep_original": False}


EVERYTHING: dict[str | type, Any] = {
    "PreProcessingWrapper": {
        "pre_processor_mapping": [
            pre("image", "ResizeImg", target_size=[4, 4], transpose=False),
            {**pre("image-resize_img", "Rgb2Gray", rgb_dim=-1), "keep_original": True},
            pre("image-resize_img", "Transpose", axes=[2, 0, 1]),
            pre("image-resize_img-rgb2gray", "UnSqueeze", dim=0),
            pre("image-resize_img-rgb2gray-unsqueeze", "Flatten", num_flatten_dims=3),
            pre("kind", "OneHot"),
        ]
    },
    "ObservationStackWrapper": {
        "stack_config": [
            {"observation": "numbers", "stack_steps": 3, "delta": True, "tag": "moves", "keep_original": True},
            {"observation": "kind-one_hot", "stack_steps": 2},
        ]
    },
    "ObservationNormalizationWrapper": {
        "default_strategy": "maze.normalization_strategies.MeanZeroStdOneObservationNormalizationStrategy",
        "default_strategy_config": {"clip_range": [-2, 2]},
        "default_statistics": {"mean": 0.5, "std": 1.5},
        "manual_config": {"numbers": {"statistics": {"mean": [1e8, 1e8, 1e8 + 1], "std": [1, 2, 3]}}},
        "exclude": ["kind-one_hot"],
        "statistics_dump": None,
    },
    "SplitActionsWrapper": {
        "split_config": {"parts": {"first": {"indices": [1]}, "others": {"indices": [2, 0]}}},
    },
    "DiscretizeActionsWrapper": {"discretization_config": {"force": {"num_actions": [3, 5], "low": -0.05}}},
    "RewardScalingWrapper": {"scale": 0.1},
    "TimeLimitWrapper": {"max_episode_steps": 20},
}


def n_equal_steps(env: Any, bundle: PolicyBundle, n_steps: int = 60, provided: Any = None) -> int:
    """Act in the environment by the policy, and beside it by the bundle; count the steps without a difference."""
    policy, operations, session = policy_for(env), operations_of(env), bundle.session(provided=provided)
    is_done, n_equal, observation = True, 0, {}
    env.seed(11)
    with tapped(env, operations) as (watched, tap):
        for _ in range(n_steps):
            if is_done:
                observation = watched.reset()
                session.reset()
            actor = watched.actor_id()
            kind = bundle.step(actor.step_key).observation_kind
            found = session.act(tap.entries if kind == "converted" else operations.environment.get_maze_state(), actor)
            action = policy.compute_action(observation, actor_id=actor, deterministic=True)
            if kind != "converted":
                base = operations.environment
                assert base.core_env.env.action_space.contains(found), found
            expected = raw_action(action, operations, actor)
            n_equal += same(found, expected)
            observation, _, is_done, _ = watched.step(action)
    return n_equal


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(same(found[key], expected[key]) for key in expected)
    return np.asarray(found).dtype == np.asarray(expected).dtype and np.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_every_built_in_wrapper_is_data(exported):
    env = WrapperFactory.wrap_from_config(GymMazeEnv(Shower()), EVERYTHING)
    bundle = PolicyBundle(exported(env))
    assert bundle.card["code"] == []
    assert {each["class"].rpartition(".")[2]: each["kept_as"] for each in bundle.card["wrappers"]} == {
        **dict.fromkeys(list(EVERYTHING)[:5], "data"),
        **dict.fromkeys(list(EVERYTHING)[5:], "left out"),
    }
    assert len(bundle.episode) == 20  # until the time limit
    assert n_equal_steps(env, bundle) == 60


class Machines(gymnasium.Env[Any, Any]):
    """Shows choices."""

    observation_space = spaces.Dict(
        {
            "kind": spaces.Discrete(3, start=2),
            "states": spaces.MultiDiscrete([2, 4], start=[1, 0]),
            "flags": spaces.MultiBinary(2),
        }
    )
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 1.0, False, False, {}


def test_choices_outside_of_the_space_are_refused_with_their_name_and_the_allowed_ones(exported):
    session = PolicyBundle(exported(GymMazeEnv(Machines()))).session()
    first, last = {"kind": 2, "states": [1, 0], "flags": [0, 0]}, {"kind": 4, "states": [2, 3], "flags": [1, 1]}
    for allowed in (first, last):
        session.act(allowed)
    for name, value, expected in (
        ("kind", 1, "2 to 4"),
        ("kind", 5, "2 to 4"),
        ("states", [2, 4], r"\[1, 0\] to \[2, 3\]"),
        ("states", [0, 3], r"\[1, 0\] to \[2, 3\]"),
        ("flags", [0, 2], "0 to 1"),
    ):
        with pytest.raises(EnvironmentContractError, match=f"`{name}`: expected choices from {expected}, found"):
            session.act({**first, name: value})


class Twice(ObservationWrapper[Any]):
    """Somebody's own conversion."""

    def observation(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        return {"observation": 2.0 * observation["observation"]}


class Turned(ActionWrapper[Any]):
    """Somebody's own conversion."""

    def action(self, action: Mapping[str, Any]) -> dict[str, Any]:
        return {"action": 1 - action["action"]}

    def reverse_action(self, action: Mapping[str, Any]) -> dict[str, Any]:
        return self.action(action)


def test_user_code_is_named_and_must_be_provided(exported):
    env = Turned(Twice(GymMazeEnv("CartPole-v1")))
    bundle = PolicyBundle(exported(env))
    pieces = {piece["name"]: piece for piece in bundle.card["code"]}
    assert list(pieces) == ["Twice.observation", "Turned.action"]
    assert pieces["Twice.observation"]["class"].endswith("test_wrappers_as_data.Twice")
    with pytest.raises(BundleError, match=r"cannot hold: .*Twice. Provide it as .*'Twice.observation': function"):
        bundle.session()
    provided = {
        "Twice.observation": lambda entries, actor: {"observation": 2.0 * entries["observation"]},
        "Turned.action": lambda action, actor: {"action": 1 - action["action"]},
    }
    assert n_equal_steps(env, bundle, provided=provided) == 60
    with pytest.raises(BundleError, match=r"'Twice'\]: .* no such code. Did you mean `Twice.observation`"):
        bundle.session(provided={**provided, "Twice": print})
    # what the network takes needs no code
    assert bundle.act_batch(0, {"observation": np.zeros((1, 4))}).actions["action"].shape == (1,)


class Alternating(Wrapper[Any]):
    """A custom wrapper of unknown effect."""

    def step(self, action: Any) -> Any:
        return self._env_step({"action": 1 - action["action"]})


def test_a_wrapper_of_unknown_effect_is_exported_as_part_of_the_environment(exported):
    env = RewardScalingWrapper(Alternating(GymMazeEnv("CartPole-v1")), scale=2.0)
    bundle = PolicyBundle(exported(env))
    assert [(piece["name"], piece["is_required"]) for piece in bundle.card["code"]] == [("Alternating", False)]
    assert bundle.session().act({"observation": np.zeros(4)}).keys() == {"action"}
    assert n_equal_steps(env, bundle) == 60


@pytest.mark.parametrize("mode", ["sticky", "noop"])
def test_decisions_that_hold_for_several_steps_are_repeated(exported, mode):
    env: Any = GymMazeEnv("CartPole-v1")
    env.action_conversion_dict[0].noop_action = lambda: {"action": 1}
    env = WrapperFactory.wrap_from_config(
        env,
        {
            "ObservationStackWrapper": {"stack_config": [{"observation": "observation", "stack_steps": 2}]},
            "StepSkipWrapper": {"n_steps": 3, "skip_mode": mode},
        },
    )
    bundle = PolicyBundle(exported(env))
    policy, session = policy_for(env), bundle.session()
    taken: list[int] = []
    shown: list[Any] = []
    gym_env = env.core_env.env
    original = gym_env.step

    def step(action: int) -> Any:
        taken.append(action)
        result = original(action)
        shown.append(result[0])
        return result

    gym_env.step = step
    env.seed(0)
    for _ in range(5):
        observation = env.reset()
        shown.append(env.get_maze_state())
        session.reset()
        is_done = False
        while not is_done:
            action = policy.compute_action(observation, deterministic=True)
            observation, _, is_done, _ = env.step(action)
        states, actions = shown[: len(taken)], taken[:]
        assert [session.act(state) for state in states] == actions
        taken.clear()
        shown.clear()


def test_an_environments_own_conversions_may_be_provided(exported):
    from maze.test.shared_test_utils.helper_functions import build_dummy_maze_env

    env = build_dummy_maze_env()
    bundle = PolicyBundle(exported(env))
    names = [piece["name"] for piece in bundle.card["code"]]
    assert names == ["observation_conversion.0", "action_conversion.0"]
    assert n_equal_steps(env, bundle, 20) == 20
    conversion = env.observation_conversion_dict[0]
    env.reset()
    state = env.get_maze_state()
    session = bundle.session(provided={"observation_conversion.0": conversion.maze_to_space})
    assert session.act(state).keys() == env.action_space.spaces.keys()
    with pytest.raises(Exception, match=r"To pass states .*, provide their conversion as 'observation_conversion.0'"):
        bundle.session().act(object())
