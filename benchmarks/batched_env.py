"""How much faster a simulation written for many is stepped and trained at once than one environment after the other.

python benchmarks/batched_env.py            # lost sales and the criss-cross network, both placements alternately
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from maze.api.run_context import RunContext
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.train.parallelization.placement import Batched, InProcess
from maze_envs.inventory.lost_sales import LostSalesEnv
from maze_envs.queueing.network import QueueingEnv

N_ENVS = 64


def stepping(env_class: Callable[[], BatchedMazeEnv], placement: Any, n_ticks: int) -> float:
    """CPU microseconds of a step of one environment, statistics on."""
    env = placement.vector_env(env_class, N_ENVS, "train")
    env.seed(list(range(N_ENVS)))
    env.reset()
    rng = np.random.default_rng(0)
    heads = env.action_spaces_dict[0]
    actions = [{name: rng.integers(0, space.n, N_ENVS) for name, space in heads.items()} for _ in range(20)]
    begun = time.process_time()
    for tick in range(n_ticks):
        env.step(actions[tick % 20])
    return (time.process_time() - begun) / n_ticks / N_ENVS * 1e6


def training(env_class: Callable[[], BatchedMazeEnv], placement: str, n_updates: int) -> float:
    """CPU microseconds of a step in a training with PPO, its updates and one evaluation included."""
    overrides = {
        "runner.placement": placement,
        "runner.concurrency": N_ENVS,
        "runner.eval_concurrency": 8,
        "algorithm.epoch_length": n_updates,
        "algorithm.n_rollout_steps": 32,
        "algorithm.batch_size": 512,
        "algorithm.n_optimization_epochs": 4,
        "algorithm.rollout_evaluator.n_episodes": 8,
    }
    with (
        tempfile.TemporaryDirectory() as directory,
        RunContext(env=env_class, run_dir=directory, algorithm="ppo", silent=True, overrides=overrides) as rc,
    ):
        rc.train(n_epochs=1)  # with everything that happens once
        begun = time.process_time()
        rc.train(n_epochs=1)
        return (time.process_time() - begun) / (n_updates * 32 * N_ENVS) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("CPU microseconds for each step of an environment: one by one, at once, and how many times as fast (medians)")
    for name, env_class in (("lost sales", LostSalesEnv), ("criss-cross", QueueingEnv)):
        rows: dict[str, list[tuple[float, float]]] = {"stepping": [], "PPO training": []}
        for _ in range(arguments.rounds):
            rows["stepping"].append((stepping(env_class, InProcess(), 60), stepping(env_class, Batched(), 600)))
            rows["PPO training"].append((training(env_class, "in_process", 4), training(env_class, "batched", 10)))
        for what, pairs in rows.items():
            one, many = (statistics.median(values) for values in zip(*pairs, strict=True))
            ratio = statistics.median(first / second for first, second in pairs)
            print(f"  {name:12} {what:13} {one:8.1f} {many:8.1f} {ratio:8.1f}")


if __name__ == "__main__":
    main()
