"""Bundles in Maze environments, rollouts and deployments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import ObservationWrapper, Wrapper
from maze.evaluation.runners import played_measures
from maze.interop import to_sb3
from maze.serve.bundle import PolicyBundle
from maze.serve.drift import DriftLimits
from maze.serve.policy import BundlePolicy, WholeBundlePolicy
from maze.serve.wrappers_as_data import wrappers_of_environment
from tests.serve.serving import always, cartpole, cartpole_observations, cutting, cutting_env, pendulum, remembering


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "cartpole.maze"
    path.write_bytes(cartpole())
    return path


def test_a_bundle_policy_acts_as_a_session(bundle: Path) -> None:
    policy, env = BundlePolicy(bundle), GymMazeEnv("CartPole-v1")
    for deterministic in (True, False):
        policy.seed(5)
        session = PolicyBundle.load(bundle).session(5)
        for observation in cartpole_observations(30):
            found = policy.compute_action(
                {"observation": np.array(observation, np.float32)}, None, None, env.actor_id(), deterministic
            )
            assert found["action"] == session.act(observation, deterministic=deterministic)
    env.reset()
    actions, probabilities = policy.compute_top_action_candidates(env.reset(), None, None, None)
    assert sorted(action["action"] for action in actions) == [0, 1]
    assert sum(probabilities) == pytest.approx(1.0)


def test_a_bundle_policy_is_rolled_out_by_the_runners(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runner = SequentialRolloutRunner(
        n_episodes=2, max_episode_steps=5, record_trajectory=True, record_event_logs=False, render=False
    )
    runner.run_with(
        GymMazeEnv("CartPole-v1"), {}, {"_target_": "maze.serve.policy.BundlePolicy", "bundle": str(bundle)}
    )
    assert len(list((tmp_path / "trajectory_data").iterdir())) == 2


def test_a_deployment_of_a_bundle_acts_as_the_bundle_and_warns_of_drift(
    bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = PolicyBundle.load(bundle).session()
    system = gym.make("CartPole-v1")
    with AgentDeployment.from_bundle(bundle, GymMazeEnv("CartPole-v1"), deterministic=True) as deployment:
        state, _ = system.reset(seed=1)
        for _ in range(8):
            action = deployment.act(state, 1.0, False, {})
            assert action == expected.act(state)
            state, *_ = system.step(action)
        deployment.finish_episode()
        assert caplog.text == ""
        for _ in range(DriftLimits.at_least + 1):
            deployment.act(state + np.array([1.0, 0.0, 0.0, 0.0], np.float32), 1.0, False, {})
    assert caplog.text.count("the latest") == 1


@pytest.mark.parametrize(
    ("content", "env"),
    [
        (pendulum, partial(GymMazeEnv, "Pendulum-v1")),
        (cutting, cutting_env),
        (remembering, partial(GymMazeEnv, "CartPole-v1")),
    ],
)
def test_a_whole_bundle_acts_as_its_networks_do_where_there_are_no_wrappers(
    content: Callable[[], bytes], env: Callable[[], MazeEnv[Any]]
) -> None:
    """Entries of one and of several sub-steps, actions that are clipped and packed, sampled by the same seeds."""
    bundle = PolicyBundle(content())
    returns = []
    for policy in (BundlePolicy(bundle), WholeBundlePolicy(bundle)):
        wrapped = TimeLimitWrapper.wrap(env(), max_episode_steps=30)
        returns.append(
            played_measures(wrapped, policy, [(1, 2), (3, 4)], deterministic=False, episode_done=lambda _: None)
        )
    assert returns[0] == returns[1]


def test_predicted_actions_of_a_bundle_are_clipped_to_its_action_space(tmp_path: Path) -> None:
    path = tmp_path / "pendulum.maze"
    path.write_bytes(pendulum())
    observations = np.zeros((200, 3), np.float32)
    drawn = BundlePolicy(path).compute_actions({"observation": observations})["action"]
    actions = to_sb3(path).predict(observations)[0]
    assert abs(drawn).max() > 2.0
    assert abs(actions).max() == 2.0


def test_a_whole_bundle_refuses_other_environments(
    bundle: Path, exported: Callable[..., bytes], tmp_path: Path
) -> None:
    target = {"_target_": "maze.serve.policy.WholeBundlePolicy", "bundle": str(bundle)}
    with pytest.raises(ConfigError, match=r"was trained in .*CartPole"):
        RolloutRunner.init_env_and_agent(GymMazeEnv("Pendulum-v1"), {}, 0, target)
    own = tmp_path / "own.maze"
    own.write_bytes(exported(OwnScale.wrap(GymMazeEnv("CartPole-v1"))))
    with pytest.raises(ConfigError, match=r"requires the code of .*OwnScale"):
        WholeBundlePolicy(own)


class OwnScale(ObservationWrapper[MazeEnv[Any]]):
    """Somebody's own code."""

    def observation(self, observation: Any) -> Any:
        return {name: value * 2 for name, value in observation.items()}


def test_bundle_policy_removes_only_the_wrappers_that_the_bundle_contains() -> None:
    stack, limit, scale = "ObservationStackWrapper", "TimeLimitWrapper", "RewardScalingWrapper"
    wrappers = [{limit: {"max_episode_steps": 9}}, {stack: {"stack_config": []}}, {scale: {"scale": 2.0}}]

    def kept(with_own: bool) -> list[str]:
        return [each["_target_"].rpartition(".")[2] for each in wrappers_of_environment(wrappers, with_own)]

    assert kept(True) == kept(False) == [limit, scale]
    wrappers.insert(2, {f"{__name__}.{OwnSteps.__name__}": {}})
    assert kept(True) == [limit, stack, "OwnSteps", scale], "the stack is inside of what only code can stand for"
    assert kept(False) == [limit, scale]


class OwnSteps(Wrapper[MazeEnv[Any]]):
    """Nobody knows what it does."""


def test_candidates_of_a_bundle(tmp_path: Path) -> None:
    path = tmp_path / "always.maze"
    path.write_bytes(always(1))
    with AgentDeployment.from_bundle(path, GymMazeEnv("CartPole-v1"), num_candidates=2) as deployment:
        choice = deployment.act(np.zeros(4, np.float32), 0, False, {})
    assert list(choice.candidates) == [1, 0]
    assert choice.probabilities[0] == pytest.approx(1 / (1 + np.exp(-5.0)))
