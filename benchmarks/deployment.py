"""Compare deployed agents with the recorded rollouts whose states they receive.

* Fidelity: the actions that a deployment takes in at least 10,000 recorded states, compared with the recorded ones.
* Endurance: what 1,000 episodes in a row leave behind.
* Latency: the time of ``act``, in units of a direct call of the policy with an observation that is ready; medians of
  batches that take turns. "hand-over" is what it costs to wake another thread and be woken by it, and nothing else.

    python benchmarks/deployment.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.dummy_cartpole_policy import DummyCartPolePolicy
from maze.core.agent.torch_policy import TorchPolicy
from maze.core.agent_deployment.agent_deployment import AgentDeployment
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.monitoring_wrapper import base_maze_env
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import Wrapper
from maze.core.wrappers.wrapper_factory import WrapperFactory
from maze.distributions.distribution_mapper import DistributionMapper
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet
from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory

NORMALIZED_AND_STACKED: dict[str | type, Any] = {
    "ObservationNormalizationWrapper": {
        "default_strategy": "maze.normalization_strategies.MeanZeroStdOneObservationNormalizationStrategy",
        "default_statistics": {"mean": 0.1, "std": 0.8},
        "statistics_dump": None,
    },
    "ObservationStackWrapper": {"stack_config": [{"observation": "observation", "stack_steps": 4}]},
}


class Recorder(Wrapper[Any]):
    """Stands right above the simulation and remembers its states and the actions that it got."""

    def __init__(self, env: Any) -> None:
        self.episodes: list[list[list[Any]]] = []
        super().__init__(env)

    def reset(self) -> Any:
        observation = self.env.reset()
        self.episodes.append([[copy.deepcopy(self.env.get_maze_state()), 0.0, {}, None]])
        return observation

    def step(self, action: Any) -> Any:
        result = self.env.step(action)
        self.episodes[-1][-1][3] = copy.deepcopy(self.env.get_maze_action())
        self.episodes[-1].append([copy.deepcopy(self.env.get_maze_state()), result[1], dict(result[3]), None])
        return result


def gym_env(name: str) -> Callable[[], Any]:
    """Make a gymnasium environment with normalised observations of the last four steps."""
    return lambda: WrapperFactory.wrap_from_config(GymMazeEnv(name), NORMALIZED_AND_STACKED)


def cutting() -> Any:
    """The cutting environment with two sub-steps and masks."""
    return struct_env_factory(
        max_pieces_in_inventory=50, raw_piece_size=(100, 100), static_demand=[(30, 15), (20, 40), (60, 10)]
    )


def network_policy(env: Any) -> TorchPolicy:
    """An untrained network with two hidden layers that samples its actions."""
    heads = {head: entry for space in env.action_spaces_dict.values() for head, entry in space.spaces.items()}
    mapper = DistributionMapper(action_space=spaces.Dict(heads), distribution_mapper_config={})
    networks: dict[Any, Any] = {
        key: FlattenConcatPolicyNet(
            obs_shapes={name: entry.shape for name, entry in space.spaces.items()},
            action_logits_shapes={head: mapper.required_logits_shape(head) for head in env.action_spaces_dict[key]},
            hidden_units=[64, 64],
            non_lin="torch.nn.Tanh",
        )
        for key, space in env.observation_spaces_dict.items()
    }
    policy = TorchPolicy(networks, mapper, "cpu")
    policy.eval()
    return policy


def record(make_env: Callable[[], Any], policy: Any, n_states: int, max_steps: int) -> list[list[list[Any]]]:
    """Rolls a policy out, episode i with seed i, until there are enough states."""
    env = make_env()
    maze_env = base_maze_env(env)
    layers = [env]
    while layers[-1] is not maze_env:
        layers.append(layers[-1].env)
    recorder = Recorder(maze_env)
    if len(layers) == 1:
        env = recorder
    else:
        layers[-2].env = recorder
        for layer in reversed(layers[:-2]):
            layer.env = layer.env
    limited: Any = TimeLimitWrapper.wrap(env, max_episode_steps=max_steps)
    n_recorded = 0
    while n_recorded < n_states:
        seed = len([episode for episode in recorder.episodes if len(episode) > 1])
        recorder.episodes = [episode for episode in recorder.episodes if len(episode) > 1]
        RolloutRunner.run_interaction_loop(limited, policy, 1, episode_seeds=[(seed, seed)])
        n_recorded = sum(len(episode) - 1 for episode in recorder.episodes)
    return [episode for episode in recorder.episodes if len(episode) > 1]


def n_differences(deployment: AgentDeployment, episodes: list[list[list[Any]]]) -> tuple[int, int]:
    """Return the number of states, and of states with other actions than recorded."""
    n_states = n_different = 0
    for seed, episode in enumerate(episodes):
        deployment.policy.seed(seed)
        for state, reward, info, recorded in episode[:-1]:
            action = deployment.act(state, reward, False, info)
            n_states += 1
            n_different += not _are_equal(action, recorded)
        state, reward, info, _ = episode[-1]
        deployment.finish_episode(state, reward, True, info)
    return n_states, n_different


def _are_equal(one: Any, other: Any) -> bool:
    try:
        np.testing.assert_equal(getattr(one, "__dict__", one), getattr(other, "__dict__", other))
    except AssertionError:
        return False
    return True


def fidelity(n_states: int) -> dict[str, Any]:
    """States and differing actions by environment."""
    results = {}
    for name, make_env, max_steps in (
        ("CartPole-v1, normalized, 4 stacked", gym_env("CartPole-v1"), 200),
        ("LunarLander-v3, normalized, 4 stacked", gym_env("LunarLander-v3"), 200),
        ("cutting-2D, two masked sub-steps", cutting, 200),
    ):
        policy = network_policy(make_env())
        episodes = record(make_env, policy, n_states, max_steps)
        with AgentDeployment(policy, make_env()) as deployment:
            results[name] = dict(zip(("states", "different"), n_differences(deployment, episodes), strict=True))
    return results


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _n_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def endurance(n_episodes: int) -> dict[str, Any]:
    """Return threads, descriptors and memory after episodes and deployments, relative to a warm-up."""
    env = gym_env("CartPole-v1")()
    policy = network_policy(env)
    state = np.zeros(4, np.float32)
    deployment = AgentDeployment(policy, gym_env("CartPole-v1")(), stats_window=100)

    def run(one: AgentDeployment, n: int) -> None:
        for _ in range(n):
            for _ in range(10):
                one.act(state, 1.0, False, {})
            one.finish_episode(state, 1.0, True, {})

    def measure() -> tuple[int, int, int]:
        gc.collect()
        return _resident_bytes(), _n_files(), threading.active_count()

    sizes = []
    for _ in range(2):
        run(deployment, n_episodes)
        for _ in range(n_episodes):
            with AgentDeployment(policy, env) as other:
                run(other, 1)
        sizes.append(measure())
    deployment.close()
    first, second = sizes
    return {
        "episodes": n_episodes,
        "deployments": n_episodes,
        "resident_kib": (second[0] - first[0]) / 1024,
        "files": second[1] - first[1],
        "threads": second[2] - first[2],
        "threads_after_close": threading.active_count() - 1,
    }


def hand_over_seconds(n: int) -> float:
    """Seconds to wake another thread and be woken by it."""
    there: SimpleQueue[Any] = SimpleQueue()
    back: SimpleQueue[Any] = SimpleQueue()

    def echo() -> None:
        while there.get():
            back.put(True)

    thread = threading.Thread(target=echo, daemon=True)
    thread.start()
    start = time.perf_counter()
    for _ in range(n):
        there.put(True)
        back.get()
    seconds = (time.perf_counter() - start) / n
    there.put(False)
    thread.join()
    return seconds


def latency(n_rounds: int, n_calls: int) -> dict[str, Any]:
    """Microseconds of a direct call, and `act` and the hand-over in units of it."""
    results = {}
    for name, make_env, make_policy in (
        ("heuristic, no wrappers", lambda: GymMazeEnv("CartPole-v1"), lambda env: DummyCartPolePolicy()),
        ("network, no wrappers", lambda: GymMazeEnv("CartPole-v1"), network_policy),
        ("network, normalized, 4 stacked", gym_env("CartPole-v1"), network_policy),
    ):
        env = make_env()
        policy = make_policy(env)
        observation, actor = env.reset(), env.actor_id()
        state = np.zeros(4, np.float32)
        times: dict[str, list[float]] = {"direct": [], "act": [], "hand-over": []}
        with AgentDeployment(policy, make_env()) as deployment:
            for _ in range(n_rounds):
                start = time.perf_counter()
                for _ in range(n_calls):
                    policy.compute_action(observation, maze_state=None, env=None, actor_id=actor)
                times["direct"].append((time.perf_counter() - start) / n_calls)
                start = time.perf_counter()
                for _ in range(n_calls):
                    deployment.act(state, 1.0, False, {})
                times["act"].append((time.perf_counter() - start) / n_calls)
                deployment.finish_episode()
                times["hand-over"].append(hand_over_seconds(n_calls))
        medians = {key: statistics.median(values) for key, values in times.items()}
        results[name] = {
            "direct_us": 1e6 * medians["direct"],
            "act": medians["act"] / medians["direct"],
            "hand_over": medians["hand-over"] / medians["direct"],
        }
    return results


def main() -> int:
    """Run and print all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    arguments = parser.parse_args()
    share = 10 if arguments.quick else 1
    results = {
        "fidelity": fidelity(10_000 // share),
        "endurance": endurance(1_000 // share),
        "latency": latency(n_rounds=20 // min(share, 4), n_calls=1_000 // share),
    }
    print(f"{'recorded actions':<40}{'states':>10}{'different':>12}")
    for name, row in results["fidelity"].items():
        print(f"{name:<40}{row['states']:>10}{row['different']:>12}")
    left = results["endurance"]
    print(
        f"\nleft behind by {left['episodes']} episodes and {left['deployments']} deployments: "
        f"{left['threads']} threads, {left['files']} files, {left['resident_kib']:.0f} KiB; "
        f"after close {left['threads_after_close']} threads"
    )
    print(f"\n{'latency, in direct calls of the policy':<40}{'act':>10}{'hand-over':>12}{'direct call':>14}")
    for name, row in results["latency"].items():
        print(f"{name:<40}{row['act']:>9.1f}x{row['hand_over']:>11.1f}x{row['direct_us']:>11.1f} us")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    is_faithful = all(row["different"] == 0 for row in results["fidelity"].values())
    is_clean = left["threads"] == left["files"] == left["threads_after_close"] == 0
    return 0 if is_faithful and is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
