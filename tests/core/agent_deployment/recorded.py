"""Episodes recorded between simulation and wrappers, and the agents that are deployed on them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from maze.core.log_stats.log_stats import LogStats, LogStatsLevel
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.wrapper import Wrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory


class Report:
    """What the real system would report of one state."""

    def __init__(self, env: Any, events: list[Any], reward: float, done: bool, info: Any) -> None:
        self.maze_state = copy.deepcopy(env.get_maze_state())
        self.actor_id = env.actor_id()
        self.reward, self.done, self.info = reward, done, dict(info)
        self.is_step_complete = env.context.is_step_complete
        self.events = events
        self.maze_action: Any = None
        """The action that was taken in the state."""


class Recorder(Wrapper[Any]):
    """Stands right above the simulation."""

    def __init__(self, env: Any) -> None:
        self.episodes: list[list[Report]] = []
        super().__init__(env)

    def reset(self) -> Any:
        observation = self.env.reset()
        self._n_reported = 0
        self.episodes.append([Report(self.env, self._new_events(), 0, False, {})])
        return observation

    def step(self, action: Any) -> Any:
        if self.episodes[-1][-1].is_step_complete:
            self._n_reported = 0
        result = self.env.step(action)
        self.episodes[-1][-1].maze_action = copy.deepcopy(self.env.get_maze_action())
        self.episodes[-1].append(Report(self.env, self._new_events(), *result[1:]))
        return result

    def _new_events(self) -> list[Any]:
        """The simulation's events since the last report; those of a step are kept until the next one begins."""
        events = list(self.env.get_step_events())[self._n_reported :]
        self._n_reported += len(events)
        return [event for event in events if not event.interface_class.__module__.startswith("maze.core.")]

    def get_observation_and_action_dicts(self, *arguments: Any) -> Any:
        return self.env.get_observation_and_action_dicts(*arguments)


class RepeatActionWrapper(Wrapper[Any]):
    """Repeats each action of the agent, as action-skipping wrappers do."""

    def __init__(self, env: Any, n_times: int) -> None:
        self.n_times = n_times
        super().__init__(env)

    def step(self, action: Any) -> Any:
        total = 0.0
        for _ in range(self.n_times):
            observation, reward, done, info = self.env.step(action)
            total += reward
            if done:
                break
        return observation, total, done, info

    def get_observation_and_action_dicts(self, *arguments: Any) -> Any:
        return self.env.get_observation_and_action_dicts(*arguments)


def with_recorder(env: Any) -> tuple[Any, Recorder]:
    """The environment with a recorder put below its wrappers."""
    maze_env = base_maze_env(env)
    recorder = Recorder(maze_env)
    if env is maze_env:
        return recorder, recorder
    layers = [env]
    while layers[-1].env is not maze_env:
        layers.append(layers[-1].env)
    layers[-1].env = recorder
    for layer in reversed(layers[:-1]):
        layer.env = layer.env
    return env, recorder


def record(
    make_env: Callable[[], Any], policy: Any, n_episodes: int, max_steps: int, deterministic: bool = False
) -> tuple[list[list[Report]], LogStats]:
    """Rolls a policy out, episode i with seed i; the episodes and their statistics."""
    env, recorder = with_recorder(make_env())
    if max_steps:
        from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

        env = TimeLimitWrapper.wrap(env, max_episode_steps=max_steps)
    env = LogStatsWrapper.wrap(env)
    seeds = [(episode, episode) for episode in range(n_episodes)]
    RolloutRunner.run_interaction_loop(env, policy, n_episodes, episode_seeds=seeds, deterministic=deterministic)
    env.write_epoch_stats()
    return [episode for episode in recorder.episodes if len(episode) > 1], env.get_stats(LogStatsLevel.EPOCH).last_stats


def actions_of(deployment: Any, episode: list[Report]) -> Iterator[Any]:
    """Has the deployment act in the states of a recorded episode."""
    for report in episode[:-1]:
        yield deployment.act(
            report.maze_state,
            report.reward,
            report.done,
            report.info,
            report.events,
            report.actor_id,
            report.is_step_complete,
        )
    last = episode[-1]
    deployment.finish_episode(last.maze_state, last.reward, last.done, last.info, last.events)


def replay(deployment: Any, episodes: list[list[Report]], compare: Callable[[Any, Any], None] | None = None) -> int:
    """Checks that a deployment takes the recorded actions; the number of compared states."""
    n_states = 0
    for seed, episode in enumerate(episodes):
        deployment.policy.seed(seed)
        for report, action in zip(episode[:-1], actions_of(deployment, episode), strict=True):
            (compare or same_action)(action, report.maze_action)
            n_states += 1
    return n_states


def same_action(action: Any, expected: Any) -> None:
    """Compares numbers, arrays and action objects."""
    np.testing.assert_equal(getattr(action, "__dict__", action), getattr(expected, "__dict__", expected))


def named(stats: LogStats) -> dict[str, Any]:
    """Statistics by readable names."""
    return {f"{key.event.__qualname__} {key.output_name} {key.group}": value for key, value in stats.items()}


def normalized_and_stacked(name: str) -> Any:
    """A gymnasium environment with normalised observations of the last three steps."""
    wrappers = {
        "ObservationNormalizationWrapper": {
            "default_strategy": "maze.normalization_strategies.MeanZeroStdOneObservationNormalizationStrategy",
            "default_statistics": {"mean": 0.1, "std": 0.5},
            "statistics_dump": None,
            "sampling_policy": {"_target_": "maze.core.agent.random_policy.RandomPolicy"},
        },
        "ObservationStackWrapper": {"stack_config": [{"observation": "observation", "stack_steps": 3}]},
    }
    return WrapperFactory.wrap_from_config(GymMazeEnv(name), wrappers)


def torch_policy_for(env: Any) -> Any:
    """An untrained network that samples its actions."""
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.distributions.distribution_mapper import DistributionMapper
    from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet

    networks = {}
    mapper = DistributionMapper(action_space=merged(env.action_spaces_dict), distribution_mapper_config={})
    for key, space in env.observation_spaces_dict.items():
        networks[key] = FlattenConcatPolicyNet(
            obs_shapes={name: entry.shape for name, entry in space.spaces.items()},
            action_logits_shapes={head: mapper.required_logits_shape(head) for head in env.action_spaces_dict[key]},
            hidden_units=[16],
            non_lin="torch.nn.Tanh",
        )
    policy = TorchPolicy(networks, mapper, "cpu")
    policy.eval()
    return policy


def merged(action_spaces: Any) -> Any:
    """One space with the heads of all sub-steps."""
    from gymnasium import spaces

    return spaces.Dict({head: entry for space in action_spaces.values() for head, entry in space.spaces.items()})


def deployment_threads() -> list[threading.Thread]:
    """The threads of deployments; libraries that other tests use keep threads of their own."""
    return [thread for thread in threading.enumerate() if thread.name == "maze-agent-deployment"]
