"""Speed of vector environments relative to gymnasium's and to the environments themselves.

All figures are ratios of runs that alternate with one another on the same machine; medians are printed.

    python benchmarks/vector_env.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv
from maze.train.parallelization.vector_env.subproc_vector_env import SubprocVectorEnv

N_ENVS = 8
N_WORKERS = 2
BURN_SECONDS = 0.001


class BurningEnv(gym.Env[np.ndarray, int]):
    """Spends a fixed amount of CPU time per step."""

    observation_space = gym.spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.n_steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> Any:
        end = time.thread_time() + BURN_SECONDS
        while time.thread_time() < end:
            pass
        self.n_steps += 1
        return np.zeros(4, np.float32), 1.0, self.n_steps >= 200, False, {}


def cartpole() -> GymMazeEnv:
    """A CartPole."""
    return GymMazeEnv("CartPole-v1")


def burning() -> GymMazeEnv:
    """A costly environment."""
    return GymMazeEnv(BurningEnv())


def seconds_of_stack(n_steps: int) -> float:
    """The same environments and statistics, stepped and reset by hand: what a vector environment adds is overhead."""
    envs = [LogStatsWrapper.wrap(cartpole()) for _ in range(N_ENVS)]
    for index, env in enumerate(envs):
        env.seed(index)
        env.reset()
    actions = [{"action": action} for action in np.random.default_rng(0).integers(0, 2, n_steps)]
    start = time.perf_counter()
    for action in actions:
        for env in envs:
            if env.step(action)[2]:
                env.reset()
    return time.perf_counter() - start


def seconds_of_maze(env: Any, n_steps: int) -> float:
    """Step with observations written into given arrays, as a rollout does."""
    env.seed(list(range(env.n_envs)))
    out = {
        key: {name: np.zeros((env.n_envs, *sub.shape), sub.dtype) for name, sub in space.items()}
        for key, space in env.observation_spaces_dict.items()
    }
    env.reset(out=out)
    actions = np.random.default_rng(0).integers(0, 2, (n_steps, env.n_envs))
    start = time.perf_counter()
    for action in actions:
        env.step({"action": action}, out=out)
    return time.perf_counter() - start


def seconds_of_gymnasium(env: Any, n_steps: int) -> float:
    """Step of a gymnasium vector environment."""
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(0, 2, (n_steps, env.num_envs))
    start = time.perf_counter()
    for action in actions:
        env.step(action)
    return time.perf_counter() - start


def alternate(candidates: dict[str, Callable[[], float]], n_repeats: int) -> dict[str, float]:
    """Median seconds of each candidate; they take turns, so that what else the machine does hits all of them."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(n_repeats):
        for name, run in candidates.items():
            seconds[name].append(run())
    return {name: statistics.median(values) for name, values in seconds.items()}


def measure(n_steps: int, n_burning_steps: int, n_repeats: int) -> dict[str, float]:
    """All figures."""
    envs: list[Any] = []

    def keep(env: Any) -> Any:
        envs.append(env)
        return env

    sequential = keep(SequentialVectorEnv([cartpole] * N_ENVS))
    subproc = keep(SubprocVectorEnv([cartpole] * N_ENVS, n_workers=N_WORKERS))
    make = lambda: gym.make("CartPole-v1")  # noqa: E731
    sync = keep(gym.vector.SyncVectorEnv([make] * N_ENVS))
    asynchronous = keep(gym.vector.AsyncVectorEnv([make] * N_ENVS, shared_memory=True))
    cheap = alternate(
        {
            "stack": lambda: seconds_of_stack(n_steps),
            "sequential": lambda: seconds_of_maze(sequential, n_steps),
            "subproc": lambda: seconds_of_maze(subproc, n_steps),
            "gymnasium_sync": lambda: seconds_of_gymnasium(sync, n_steps),
            "gymnasium_async": lambda: seconds_of_gymnasium(asynchronous, n_steps),
        },
        n_repeats,
    )
    burning_sequential = keep(SequentialVectorEnv([burning] * N_ENVS))
    burning_subproc = keep(SubprocVectorEnv([burning] * N_ENVS, n_workers=N_WORKERS))
    costly = alternate(
        {
            "sequential": lambda: seconds_of_maze(burning_sequential, n_burning_steps),
            "subproc": lambda: seconds_of_maze(burning_subproc, n_burning_steps),
        },
        n_repeats,
    )
    for env in envs:
        env.close()
    n_env_steps = n_steps * N_ENVS
    return {
        "sequential_steps_per_second": n_env_steps / cheap["sequential"],
        "subproc_steps_per_second": n_env_steps / cheap["subproc"],
        "sequential_overhead_us_per_env_step": (cheap["sequential"] - cheap["stack"]) / n_env_steps * 1e6,
        "sequential_vs_stack": cheap["stack"] / cheap["sequential"],
        "sequential_vs_gymnasium_sync": cheap["gymnasium_sync"] / cheap["sequential"],
        "subproc_vs_gymnasium_async": cheap["gymnasium_async"] / cheap["subproc"],
        "burning_subproc_vs_sequential": costly["sequential"] / costly["subproc"],
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, rough figures")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    options = parser.parse_args(arguments)
    figures = measure(500, 25, 3) if options.quick else measure(2000, 100, 7)
    print(f"{N_ENVS} environments, {N_WORKERS} workers; ratios of speed (above 1: Maze's is faster), medians")
    for name, value in figures.items():
        print(f"  {name:40s} {value:12.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
