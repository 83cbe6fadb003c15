"""SAC with its environments in worker processes (`runner=local`) beside the same in one process (`runner=dev`).

An environment's step burns a millisecond of CPU time. Both trainings step two environments with the same seeds, so that
they collect the same transitions and end with the same weights, which is checked. What is timed is the training
alone: collecting and learning, no evaluation. Rounds alternate between the two; medians and the median of the
per-round ratios are printed.

An update costs as much as one or two of these steps, and no process can help with it. How much is won therefore depends
on how many steps each environment takes between two updates (`--steps`).

    python benchmarks/sac_local.py              # 10 steps of each environment per update
    python benchmarks/sac_local.py --steps 1 2 4 10
    python benchmarks/sac_local.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from maze.api.run_context import RunContext
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv

N_ENVS = 2
STEP_SECONDS = 0.001


class BurningEnv(gym.Env[np.ndarray, np.ndarray]):
    """A random walk whose steps burn CPU time."""

    observation_space = gym.spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self.position, self.n_steps = self.np_random.uniform(-1, 1, 3).astype(np.float32), 0
        return self.position.copy(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Burns, and moves."""
        end = time.thread_time() + STEP_SECONDS
        while time.thread_time() < end:
            pass
        noise = self.np_random.normal(0.0, 0.1, 3).astype(np.float32)
        self.position = np.clip(self.position + action + noise, -10, 10).astype(np.float32)
        self.n_steps += 1
        return self.position.copy(), -float(np.abs(self.position).sum()), False, self.n_steps == 100, {}


def make_env() -> GymMazeEnv:
    """The environment."""
    return GymMazeEnv(BurningEnv())


def training(runner: str, n_steps: int, n_updates: int, directory: str) -> RunContext:
    """A training.

    :param runner: `dev` or `local`.
    :param n_steps: Number of steps of each environment per update.
    :param n_updates: Number of updates per epoch.
    :param directory: Where it writes.
    """
    values = {
        "num_actors": N_ENVS, "rollouts_per_iteration": N_ENVS, "n_rollout_steps": n_steps, "epoch_length": n_updates,
        "initial_buffer_size": 100, "replay_buffer_size": 10_000, "patience": 0, "rollout_evaluator": None,
    }  # fmt: skip
    seeds = {"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}
    return RunContext(
        env=make_env, algorithm="sac", critic="flatten_concat_state_action", runner=runner, run_dir=directory,
        silent=True,        overrides={**seeds, **{f"algorithm.{key}": value for key, value in values.items()}},
    )  # fmt: skip


def measure(n_steps: int, n_updates: int, n_rounds: int) -> dict[str, float]:
    """Environment steps per second of both, and the ratio.

    :param n_steps: Number of steps of each environment per update.
    :param n_updates: Number of updates in a round.
    :param n_rounds: Number of rounds.
    """
    with (
        tempfile.TemporaryDirectory() as directory,
        training("dev", n_steps, n_updates, f"{directory}/dev") as dev,
        training("local", n_steps, n_updates, f"{directory}/local") as local,
    ):
        seconds: dict[str, list[float]] = {"dev": [], "local": []}
        for _ in range(n_rounds + 1):  # the first one sets up
            for name, run in (("dev", dev), ("local", local)):
                start = time.perf_counter()
                run.train(n_epochs=1)
                seconds[name].append(time.perf_counter() - start)
        one, other = (list(run.runner.trainer.model.parameters()) for run in (dev, local))
        assert all(map(torch.equal, one, other)), "the two have not learned the same"
    rounds = {name: values[1:] for name, values in seconds.items()}
    done = n_steps * N_ENVS * n_updates
    ratio = median(a / b for a, b in zip(rounds["dev"], rounds["local"], strict=True))
    return {**{f"{name}_steps_per_second": done / median(values) for name, values in rounds.items()}, "ratio": ratio}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10], help="steps of each environment per update")
    parser.add_argument("--updates", type=int, default=40, help="updates in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="writes the results into a file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for n_steps in arguments.steps:
        results[n_steps] = result = measure(n_steps, arguments.updates, arguments.rounds)
        print(
            f"{n_steps:3} steps per update: dev {result['dev_steps_per_second']:7.0f} steps/s, "
            f"local {result['local_steps_per_second']:7.0f} steps/s, {result['ratio']:.2f} times dev",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
