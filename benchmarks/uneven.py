"""Simulators whose steps take uneven time: share of the ideal throughput, with and without lock step.

    python benchmarks/uneven.py training                          # PPO, IMPALA, DQN, SAC; 32 environments of 5 ms
    python benchmarks/uneven.py training --threads 1              # a process for each environment
    python benchmarks/uneven.py training --only dqn --fragment 10     # short fragments
    python benchmarks/uneven.py training --mean-ms 25 --only impala   # on a machine with other work
    python benchmarks/uneven.py planning                          # policy=rollout with one and with two processes

Training: each step of CartPole (SAC: Pendulum) sleeps a lognormal time, as for a simulator in another process, so that
more worker processes than cores are useful. The ideal rate is `envs / mean step time`: all environments step all the
time; acting, transfer and learning cost nothing. The measured rate counts environment steps that the algorithm has
learned from, per second of wall time, from the end of the first epoch to the end of the last one (the end of an epoch
included).
The environments are in threads of one process for each core (`--threads`: environments in a process).
"lock step" waits for all environments after each step, with a worker process for each environment. DQN and SAC learn
from one batch per update, which is one fragment of each environment, or a share of these.

Planning: ten scenarios of each decision in one and in two processes, alternately. Steps of the simulator sleep a
lognormal time, or compute: a loop until the process has used as much CPU time. For the latter, the speed-up is computed
from CPU times, as with a free core for each process: that of one process by that of the slower of two processes.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1]))

import gymnasium as gym
import numpy as np
import psutil
import torch

from maze.api.run_context import RunContext
from maze.core.utils.worker_pool import n_available_cores
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper import Wrapper
from maze.planning.rollout_policy import RolloutPolicy
from maze_envs.inventory.lost_sales import BaseStockPolicy, LostSalesEnv


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


def uneven_env(name: str, mean: float, sigma: float) -> GymMazeEnv:
    """Make the environment of training runs."""
    return GymMazeEnv(UnevenSteps(gym.make(name), mean, sigma))


def contenders(n_envs: int, fragment: int) -> dict[str, tuple[str, int, dict[str, Any]]]:
    """Return by name algorithm, number of updates of an epoch and overrides."""
    ppo = {"runner.concurrency": n_envs, "algorithm.n_rollout_steps": fragment, "algorithm.batch_size": 1024}
    of_actors = {
        "algorithm.num_actors": n_envs,
        "algorithm.n_rollout_steps": fragment,
        "algorithm.actors_batch_size": n_envs // 4,
    }
    of_buffer = {
        **{f"algorithm.{key}": n_envs for key in ("num_actors", "rollouts_per_iteration")},
        "algorithm.n_rollout_steps": fragment,
        "algorithm.initial_buffer_size": 100,
    }
    off_policy: dict[str, tuple[str, int, dict[str, Any]]] = {}
    n_updates = max(4, 200 // fragment)
    for name in ("dqn", "sac"):
        off_policy |= {
            f"{name}, lock step": (name, n_updates, {**of_buffer, "runner.placement.n_workers": n_envs}),
            f"{name}, all fragments": (name, n_updates, {**of_buffer, "runner.placement.max_restarts": 1}),
            f"{name}, wait_for=0.9": (name, n_updates, {**of_buffer, "runner.placement.wait_for": 0.9}),
            f"{name}, wait_for=0.2": (name, 4 * n_updates, {**of_buffer, "runner.placement.wait_for": 0.2}),
        }
    return {
        "ppo, lock step": ("ppo", 1, {**ppo, "runner.placement.n_workers": n_envs}),
        "ppo, all fragments": ("ppo", 4, {**ppo, "runner.placement.max_restarts": 1}),
        "ppo, wait_for=0.9": ("ppo", 4, {**ppo, "runner.placement.wait_for": 0.9}),
        "impala": ("impala", 16, of_actors),
        "impala, long queue": ("impala", 16, {**of_actors, "algorithm.queue_out_of_sync_factor": 4}),
        **off_policy,
    }


def training(mean: float, sigma: float, n_envs: int, fragment: int, n_epochs: int, only: str, threads: int) -> None:
    """Print the shares of the ideal rate."""
    torch.set_num_threads(1)
    ideal = n_envs / mean
    print(f"{n_envs} environments, {1e3 * mean:g} ms, sigma {sigma:g}, fragments of {fragment}: {ideal:,.0f} steps/s")
    print(f"{threads} environments in a process; load of the machine {os.getloadavg()[0]:.1f}")
    for name, (algorithm, n_updates, overrides) in contenders(n_envs, fragment).items():
        if only not in name:
            continue
        if "lock step" not in name:
            overrides["runner.placement.threads"] = threads
        settings = {"epoch_length": n_updates, "patience": 0, "rollout_evaluator": None}
        with tempfile.TemporaryDirectory() as directory:
            is_sac = algorithm == "sac"
            with RunContext(
                env=partial(uneven_env, "Pendulum-v1" if is_sac else "CartPole-v1", mean, sigma),
                algorithm=algorithm,
                **({"critic": "flatten_concat_state_action"} if is_sac else {}),
                runner="local",
                run_dir=directory,
                silent=True,
                overrides={**{f"algorithm.{key}": value for key, value in settings.items()}, **overrides},
            ) as run:
                run.train(n_epochs=n_epochs)
            with open(Path(directory) / "progress.csv", newline="") as file:
                rows = [(float(row["seconds"]), float(row["env_steps"])) for row in csv.DictReader(file)]
        (start, first), (end, last) = rows[0], rows[-1]
        rate = (last - first) / (end - start)
        print(f"{name:20s} {rate:8,.0f} steps/s  {rate / ideal:5.2f} of the ideal", flush=True)


class SlowSteps(Wrapper[Any]):
    """Let each step of a Maze environment sleep or compute.

    :param env: The environment.
    :param mean: Mean in seconds.
    :param sigma: Standard deviation of the logarithm; 0: all steps take the mean.
    :param computes: Whether steps compute instead of sleeping.
    """

    CLONED = ()

    def __init__(self, env: Any, mean: float, sigma: float, computes: bool) -> None:
        self._location, self._sigma, self._computes = np.log(mean) - sigma**2 / 2, sigma, computes
        self._times = np.random.default_rng()
        super().__init__(env)

    def step(self, action: Any) -> Any:
        seconds = self._times.lognormal(self._location, self._sigma)
        if not self._computes:
            time.sleep(seconds)
        end = time.process_time() + seconds
        while self._computes and time.process_time() < end:
            pass
        return self._env_step(action)


class SinglePolicy(BaseStockPolicy):
    """A heuristic that needs the environment, so that it is simulated in copies of single environments."""

    def needs_env(self) -> bool:
        return True


def planned(n_processes: int, n_decisions: int, *steps: Any) -> tuple[float, float]:
    """Return wall time and CPU time of the slowest process, in seconds per simulated decision."""
    env = SlowSteps.wrap(LostSalesEnv(max_episode_steps=40), *steps)
    env.seed(3)
    observation = env.reset()
    policy = RolloutPolicy(SinglePolicy(18), horizon=10, scenarios=10, candidates=4, n_processes=n_processes)
    policy.bind(env)
    policy.seed(1)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]

    def seconds() -> list[float]:
        return [sum(process.cpu_times()[:2]) for process in processes]

    start, before = time.perf_counter(), seconds()
    for _ in range(n_decisions):
        policy.compute_action(observation, None, env, env.actor_id())
    wall, cpu = time.perf_counter() - start, max(map(float.__sub__, seconds(), before))
    n_simulated = policy.n_simulated
    policy.close()
    return wall / n_simulated, cpu / n_simulated


def planning(mean: float, sigma: float, n_rounds: int) -> None:
    """Print the speed-up of two processes."""
    for computes in (False, True):
        for spread in (0.0, sigma):
            pairs = [[planned(n, 2, mean, spread, computes) for n in (1, 2)] for _ in range(n_rounds)]
            ratios = [one[computes] / two[computes] for one, two in pairs]
            kind = "computes (CPU time)" if computes else "sleeps (wall time)"
            each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"simulator {kind}, {1e3 * mean:g} ms, sigma {spread:g}: {median(ratios):.2f} ({each})", flush=True)


def main() -> None:
    """Run what the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["training", "planning"])
    parser.add_argument("--mean-ms", type=float, default=5.0)
    parser.add_argument("--sigma", type=float, default=1.5)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--fragment", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=0, help="environments in a process; 0: a process for each core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="only contenders with this text in their names")
    options = parser.parse_args()
    mean = options.mean_ms / 1e3
    if options.what == "training":
        threads = options.threads or -(-options.envs // n_available_cores())
        training(mean, options.sigma, options.envs, options.fragment, options.epochs, options.only, threads)
    else:
        planning(mean, options.sigma, options.rounds)


if __name__ == "__main__":
    from benchmarks.uneven import main as run  # worker processes import the classes of this module by name

    run()
