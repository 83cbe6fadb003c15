"""Environments whose steps take uneven time: share of the ideal throughput with and without lock step.

    python benchmarks/uneven.py training                    # PPO, IMPALA and SAC, 32 environments of 5 ms
    python benchmarks/uneven.py training --envs 8 --only impala
    python benchmarks/uneven.py planning                    # policy=rollout with one and two processes

Training: each step of CartPole sleeps a lognormal time (mean 5 ms, sigma 1.5), as for a simulator in another process,
so that more worker processes than cores are useful. The ideal is `envs / mean step time`: all environments sleep all
the time, and acting, stepping, transfer and learning cost nothing. Rates are environment steps that an algorithm
learned from per second of wall time, from the end of the second epoch on, end of epochs included.

Planning: ten scenarios of each decision, in this process and in two worker processes. Steps of the simulator sleep, or
compute (a loop in Python): computing simulators need a free core for each process.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import gymnasium as gym
import numpy as np

from maze.api.run_context import RunContext
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv


class UnevenSteps(gym.Wrapper[Any, Any, Any, Any]):
    """Sleep a lognormal time in each step.

    :param env: The environment.
    :param mean: Mean in seconds.
    :param sigma: Standard deviation of the logarithm.
    """

    def __init__(self, env: Any, mean: float, sigma: float) -> None:
        super().__init__(env)
        self._location, self._sigma = np.log(mean) - sigma**2 / 2, sigma
        self._times = np.random.default_rng()

    def reset(self, *, seed: int | None = None, **kwargs: Any) -> Any:
        if seed is not None:
            self._times = np.random.default_rng(seed)
        return self.env.reset(seed=seed, **kwargs)

    def step(self, action: Any) -> Any:
        time.sleep(self._times.lognormal(self._location, self._sigma))
        return self.env.step(action)


def contenders(n_envs: int, fragment: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return algorithm and overrides by name."""
    processes = "maze.train.parallelization.placement.Processes"
    on_policy = {"runner.concurrency": n_envs, "algorithm.n_rollout_steps": fragment}
    ppo = {**on_policy, "algorithm.batch_size": 1024, "algorithm.n_optimization_epochs": 4}
    return {
        "ppo, lock step": ("ppo", {**ppo, "runner.placement.n_workers": n_envs}),
        "ppo": ("ppo", {**ppo, "runner.placement.wait_for": 0.75}),
        "impala": (
            "impala",
            {
                "algorithm.num_actors": n_envs,
                "algorithm.actors_batch_size": n_envs // 4,
                "algorithm.n_rollout_steps": fragment,
            },
        ),
    }


def training(arguments: argparse.Namespace) -> None:
    """Print the shares of the ideal."""
    mean, n_envs = arguments.mean_ms / 1e3, arguments.envs
    ideal = n_envs / mean
    print(
        f"{n_envs} environments, lognormal steps of {arguments.mean_ms:g} ms, sigma {arguments.sigma:g}: ideal {ideal:,.0f} steps/s"
    )
    for name, (algorithm, overrides) in contenders(n_envs, arguments.fragment).items():
        if arguments.only and arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory() as directory:
            common = {
                "algorithm.epoch_length": arguments.updates * (4 if algorithm == "impala" else 1),
                "algorithm.patience": 0,
                "algorithm.rollout_evaluator": None,
            }
            cpu = time.process_time()
            with RunContext(
                env=lambda: GymMazeEnv(UnevenSteps(gym.make("CartPole-v1"), mean, arguments.sigma)),
                algorithm=algorithm,
                runner="local",
                run_dir=directory,
                silent=True,
                overrides={**common, **overrides},
            ) as run:
                run.train(n_epochs=arguments.epochs)
            cpu = time.process_time() - cpu
            with open(Path(directory) / "progress.csv", newline="") as file:
                rows = list(csv.DictReader(file))
        print(rows[-1])
if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--mean-ms", type=float, default=5); p.add_argument("--sigma", type=float, default=1.5)
    p.add_argument("--envs", type=int, default=32); p.add_argument("--fragment", type=int, default=128)
    p.add_argument("--updates", type=int, default=5); p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--only", default="")
    training(p.parse_args())
