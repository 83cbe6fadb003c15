"""A deployed agent takes the actions that it took in a rollout, whatever is wrapped around the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from maze.core.agent.random_policy import RandomPolicy
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.trajectory_recording.writers.trajectory_writer_registry import TrajectoryWriterRegistry
from maze.core.wrappers.discretize_actions_wrapper import DiscretizeActionsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.monitoring_wrapper import MazeEnvMonitoringWrapper
from maze.core.wrappers.observation_stack_wrapper import ObservationStackWrapper
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.trajectory_recording_wrapper import TrajectoryRecordingWrapper
from maze_envs.logistics.dispatching.maze_env import dispatching_env
from tests.core.agent_deployment.recorded import (
    RepeatActionWrapper,
    deployment_threads,
    named,
    normalized_and_stacked,
    record,
    replay,
    torch_policy_for,
)
from tutorial_maze_env.part06_struct_env.env.maze_env import maze_env_factory
from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory


def cutting() -> Any:
    return struct_env_factory(max_pieces_in_inventory=20, raw_piece_size=(100, 100), static_demand=[(30, 15), (20, 40)])


def monitored() -> Any:
    return MazeEnvMonitoringWrapper.wrap(cutting(), observation_logging=True, action_logging=True, reward_logging=True)


def repeated() -> Any:
    return ObservationStackWrapper(
        RepeatActionWrapper(GymMazeEnv("CartPole-v1"), 3), [{"observation": "observation", "stack_steps": 2}]
    )


def discretized() -> Any:
    return DiscretizeActionsWrapper(
        GymMazeEnv("Pendulum-v1"), discretization_config={"action": {"num_actions": 5, "low": None, "high": None}}
    )


def limited() -> Any:
    return TimeLimitWrapper.wrap(normalized_and_stacked("CartPole-v1"), max_episode_steps=12)


def dispatching() -> Any:
    return dispatching_env()


ENVIRONMENTS: dict[str, Callable[[], Any]] = {
    "flat": lambda: GymMazeEnv("CartPole-v1"),
    "normalized and stacked": lambda: normalized_and_stacked("CartPole-v1"),
    "actions repeated": repeated,
    "actions discretized": discretized,
    "time limit": limited,
    "sub-steps in a wrapper, monitored": monitored,
    "several agents that come and go": dispatching,
}


@pytest.mark.parametrize("policy_of", [lambda env: RandomPolicy(env.action_spaces_dict), torch_policy_for])
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_actions_and_statistics_are_those_of_the_rollout(name: str, policy_of: Callable[[Any], Any]) -> None:
    make_env = ENVIRONMENTS[name]
    policy = policy_of(make_env())
    episodes, expected = record(make_env, policy, n_episodes=3, max_steps=20)
    with AgentDeployment(policy, make_env()) as deployment:
        assert replay(deployment, episodes) == sum(len(episode) - 1 for episode in episodes) > 10
        assert deployment.n_episodes == 3
        np.testing.assert_equal(named(deployment.stats), named(expected))
    assert not deployment_threads()


def test_trajectories_are_recorded_as_in_the_rollout() -> None:
    recorded: list[Any] = []
    writer: Any = type("Writer", (), {"write": lambda self, episode: recorded.append(episode)})()
    make_env = ENVIRONMENTS["normalized and stacked"]
    env = TrajectoryRecordingWrapper.wrap(make_env())
    policy = RandomPolicy(env.action_spaces_dict)
    TrajectoryWriterRegistry.register_writer(writer)
    try:
        episodes, _ = record(lambda: TrajectoryRecordingWrapper.wrap(make_env()), policy, n_episodes=3, max_steps=0)
        with AgentDeployment(policy, env) as deployment:
            replay(deployment, episodes)
    finally:
        TrajectoryWriterRegistry.unregister_writer(writer)
    assert len(recorded) == 6
    for in_rollout, deployed in zip(recorded[:3], recorded[3:], strict=True):
        for one, other in zip(in_rollout.step_records, deployed.step_records, strict=True):
            np.testing.assert_equal(
                (one.maze_state, one.maze_action, one.reward, one.done),
                (other.maze_state, other.maze_action, other.reward, other.done),
            )


def test_the_most_probable_actions_are_taken_on_request() -> None:
    make_env = ENVIRONMENTS["normalized and stacked"]
    policy = torch_policy_for(make_env())
    episodes, _ = record(make_env, policy, n_episodes=2, max_steps=20, deterministic=True)
    with AgentDeployment(policy, make_env(), deterministic=True) as deployment:
        replay(deployment, episodes)


def test_kpis_come_from_the_events_that_are_reported() -> None:
    env = maze_env_factory(max_pieces_in_inventory=20, raw_piece_size=(100, 100), static_demand=[(30, 15), (20, 40)])
    policy = RandomPolicy(env.action_spaces_dict)
    episodes, expected = record(lambda: env, policy, n_episodes=2, max_steps=30)
    with AgentDeployment(policy, env) as deployment:
        replay(deployment, episodes)
        stats = named(deployment.stats)
        assert any(name.startswith("BaseEnvEvents.kpi") for name in stats)
        np.testing.assert_equal(stats, named(expected))
        silent = [[*episode] for episode in episodes]
        for report in silent[0]:
            report.events = []
        replay(deployment, silent[:1])
        assert "InventoryEvents.piece_replenished None None" not in named(deployment.last_episode_stats)


@pytest.mark.long
@pytest.mark.parametrize("name", ["CartPole-v1", "LunarLander-v3"])
def test_two_thousand_states_with_stacked_and_normalized_observations(name: str) -> None:
    def make_env() -> Any:
        return normalized_and_stacked(name)

    policy = torch_policy_for(make_env())
    episodes, expected = record(make_env, policy, n_episodes=140 if name == "CartPole-v1" else 24, max_steps=500)
    with AgentDeployment(policy, make_env()) as deployment:
        assert replay(deployment, episodes) >= 2_000
        np.testing.assert_equal(named(deployment.stats), named(expected))


@pytest.mark.long
def test_two_thousand_states_of_the_structured_cutting_environment() -> None:
    policy = torch_policy_for(cutting())
    episodes, expected = record(cutting, policy, n_episodes=10, max_steps=200)
    with AgentDeployment(policy, cutting()) as deployment:
        assert replay(deployment, episodes) >= 2_000
        np.testing.assert_equal(named(deployment.stats), named(expected))


def test_an_environment_is_as_it_was_after_it_was_deployed() -> None:
    env = normalized_and_stacked("CartPole-v1")
    policy = RandomPolicy(env.action_spaces_dict)
    before, _ = record(lambda: env, policy, n_episodes=2, max_steps=10)
    conversions, simulation = dict(env.observation_conversion_dict), env.core_env
    with AgentDeployment(policy, env) as deployment:
        deployment.act(before[0][0].maze_state, 0, False, {})
        assert env.core_env is not simulation
    assert env.core_env is simulation
    assert env.observation_conversion_dict == conversions
    after, _ = record(lambda: env, policy, n_episodes=2, max_steps=10)
    for one, other in zip(before, after, strict=True):
        np.testing.assert_equal([r.maze_state for r in one], [r.maze_state for r in other])
