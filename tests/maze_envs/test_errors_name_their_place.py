"""Errors of single and vector environments say which environment, which sub-step and which key."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import numpy as np
import pytest

from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError, MazeError
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import ObservationWrapper
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from maze_envs.robotics.pick_and_place.maze_env import flat_pick_and_place_env, pick_and_place_env
from tests.train.parallelization.toy_envs import TwoStepCoreEnv, two_step_env

VECTOR_ENVS = [SequentialVectorEnv, SubprocVectorEnv]


@pytest.fixture(params=VECTOR_ENVS)
def vectorized(request):
    """Makes a vector environment, and closes it after the test."""
    made = []

    def make(*factories: Any) -> Any:
        env = request.param(list(factories))
        made.append(env)
        env.seed(list(range(len(factories))))
        return env

    yield make
    for env in made:
        env.close()


BAD_ACTIONS = [
    ({"order": 99}, "action `order`: expected an element of Discrete(9), found 99"),
    ({"order": "first"}, "action `order`: expected an element of Discrete(9), found 'first'"),
    ({"oder": 1}, "an action must be a dictionary with the keys ['order'], found {'oder': 1}"),
    (3, "an action must be a dictionary with the keys ['order'], found 3"),
]


@pytest.mark.parametrize(("action", "expected"), BAD_ACTIONS)
def test_invalid_actions_of_an_environment_are_reported(action, expected):
    env = dispatching_env()
    env.seed(0)
    env.reset()
    place = "MazeEnv (MultiAgentDispatchingCoreEnv), sub-step 'vehicle': "
    with pytest.raises(EnvironmentContractError, match=re.escape(place + expected)):
        env.step(action)


def test_errors_of_a_simulation_are_not_blamed_on_actions_that_are_right():
    env = dispatching_env()
    env.seed(0)
    env.reset()
    env.core_env.simulation.orders = []
    with pytest.raises(IndexError):
        env.step({"order": 1})


def test_an_invalid_action_in_a_vector_environment_is_reported(vectorized):
    env = vectorized(*[dispatching_env] * 3)
    env.reset()
    expected = "environment 1: MazeEnv (MultiAgentDispatchingCoreEnv), sub-step 'vehicle': action `order`: expected"
    with pytest.raises(MazeError, match=re.escape(expected)):
        env.step({"order": np.array([8, 99, 8])})


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        ({"oder": np.array([1, 1])}, r"sub-step 'vehicle', action `order`: expected .* found \['oder'\]"),
        ({"order": np.array([1, 1, 1])}, r"sub-step 'vehicle', action `order`: expected the shape \(2,\).*\(3,\)"),
        ({"order": 1}, r"sub-step 'vehicle', action `order`: expected the shape \(2,\).*found \(\)"),
        ({"order": ["a", "b"]}, r"sub-step 'vehicle', action `order`: expected numbers \(int64\)"),
    ],
)
def test_arrays_of_invalid_actions_are_reported(vectorized, actions, expected):
    env = vectorized(dispatching_env, dispatching_env)
    env.reset()
    with pytest.raises(EnvironmentContractError, match=expected):
        env.step(actions)
    env.step({"order": np.array([8, 8])})  # nothing happened


class LostCoreEnv(TwoStepCoreEnv):
    """Names an actor that it never announced."""

    def step(self, maze_action: Any) -> Any:
        result = super().step(maze_action)
        self.actor = ActorID("polish", 0)
        return result


def lost_env() -> MazeEnv[Any]:
    like = two_step_env()
    return MazeEnv(LostCoreEnv(3), like.action_conversion_dict, like.observation_conversion_dict)


WRONG_ACTOR = r"no observation conversion for sub-step 'polish'.* Known sub-steps: \['choose', 'cut'\]"


def test_a_wrong_actor_in_an_environment_is_reported():
    env = lost_env()
    env.reset()
    with pytest.raises(EnvironmentContractError, match=WRONG_ACTOR):
        env.step({"item": 0})


def test_a_wrong_actor_in_a_vector_environment_is_reported(vectorized):
    env = vectorized(two_step_env, lost_env)
    env.reset()
    with pytest.raises(MazeError, match=f"environment 1: MazeEnv: .*{WRONG_ACTOR}"):
        env.step({"item": np.array([0, 0])})


@pytest.mark.parametrize(("factory", "sub_step"), [(flat_pick_and_place_env, "0"), (pick_and_place_env, r"'\w+'")])
def test_stepping_a_finished_environment_is_reported(factory, sub_step):
    def finished(env: Any) -> Any:
        env.seed(0)
        env.reset()
        done = False
        while not done:
            env.action_space.seed(0)
            done = env.step(env.action_space.sample())[2]
        return env

    for env, n_steps in ((factory(horizon=7), 7), (TimeLimitWrapper.wrap(factory(), max_episode_steps=5), 5)):
        finished(env)
        expected = rf"sub-step {sub_step}: the episode is over after {n_steps} steps; expected `reset`"
        for _ in range(2):
            with pytest.raises(EnvironmentContractError, match=expected):
                env.step(env.action_space.sample())
        copy = factory(horizon=7)
        copy.reset()
        copy.clone_from(getattr(env, "env", env) if isinstance(env, TimeLimitWrapper) else env)
        with pytest.raises(EnvironmentContractError, match="the episode is over"):
            copy.step(copy.action_space.sample())
        finished(env)


def test_a_vector_environment_never_steps_a_finished_environment(vectorized):
    env = vectorized(*[lambda: flat_pick_and_place_env(horizon=3)] * 2)
    env.reset()
    action = {key: np.zeros(2, np.int64) for key in env.action_space}
    n_done = sum(int(env.step(action)[2].sum()) for _ in range(12))
    assert n_done == 8


class Liar(ObservationWrapper[Any]):
    """Shows something else from the second sub-step on."""

    said: ClassVar[Any] = None

    def observation(self, observation: Any) -> Any:
        return type(self).said if "choice" in observation else observation


class WrongShape(Liar):
    said: ClassVar[Any] = {"choice": np.zeros(3, np.float32)}


class WrongType(Liar):
    said: ClassVar[Any] = {"choice": np.array(["a", "b"])}


class WrongKeys(Liar):
    said: ClassVar[Any] = {"selection": np.zeros(2, np.float32)}


@pytest.mark.parametrize(
    ("liar", "expected"),
    [
        (WrongShape, r", observation `choice`: expected shape \(2,\).*found shape \(3,\)"),
        (WrongType, r", observation `choice`: expected shape \(2,\) and dtype float32.*dtype <U1"),
        (WrongKeys, r": expected an observation with the keys \['choice'\], found \['selection'\]"),
    ],
)
def test_an_observation_outside_its_space_in_a_vector_environment_is_reported(vectorized, liar, expected):
    env = vectorized(two_step_env, lambda: liar(two_step_env()))
    env.reset()
    with pytest.raises(MazeError, match=f"environment 1, sub-step 'cut'{expected}"):
        env.step({"item": np.array([0, 0])})
