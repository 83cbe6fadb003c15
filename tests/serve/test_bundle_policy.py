"""A bundle in Maze's own environments, and in a deployment."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.rollout.sequential_rollout_runner import SequentialRolloutRunner
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.serve.bundle import PolicyBundle
from maze.serve.drift_guard import DriftLimits
from maze.serve.policy import BundlePolicy
from tests.serve.serving import always, cartpole, cartpole_observations


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "cartpole.maze"
    path.write_bytes(cartpole())
    return path


def test_it_acts_as_a_session_does(bundle: Path) -> None:
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


def test_it_is_rolled_out_as_any_policy(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_candidates_of_a_bundle(tmp_path: Path) -> None:
    path = tmp_path / "always.maze"
    path.write_bytes(always(1))
    with AgentDeployment.from_bundle(path, GymMazeEnv("CartPole-v1"), num_candidates=2) as deployment:
        choice = deployment.act(np.zeros(4, np.float32), 0, False, {})
    assert list(choice.candidates) == [1, 0]
    assert choice.probabilities[0] == pytest.approx(1 / (1 + np.exp(-5.0)))
