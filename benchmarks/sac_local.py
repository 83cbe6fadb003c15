"""SAC with environments in worker processes (`runner=local`) and in one process (`runner=dev`).

An environment's step burns a millisecond of CPU time. All runs step two environments with the same seeds. With
`runner=local` the workers collect the next rollouts while the networks learn from those before; with
`algorithm.collect_ahead=false` they wait for each other, and then both runners collect the same transitions and end
with the same weights, which is checked. What is timed is the training alone: collecting and learning, no evaluation.
Rounds alternate; medians and the median of the per-round ratios are printed.

    python benchmarks/sac_local.py              # 10 steps of each environment per update
    python benchmarks/sac_local.py --steps 1 2 4 10
    python benchmarks/sac_local.py --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
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
TRAININGS = ("dev", "local, waiting", "local")


class BurningEnv(gym.Env[np.ndarray, np.ndarray]):
    """A random walk whose steps burn CPU time."""

    observation_space = gym.spaces.Box(-10.0, 10.0, (3,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode."""
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


def training(name: str, n_steps: int, n_updates: int, directory: str) -> RunContext:
    """A training.

    :param name: One of `TRAININGS`.
    :param n_steps: Number of steps of each environment per update.
    :param n_updates: Number of updates per epoch.
    :param directory: Where it writes.
    """
    values = {
        "num_actors": N_ENVS, "rollouts_per_iteration": N_ENVS, "n_rollout_steps": n_steps, "epoch_length": n_updates,
        "initial_buffer_size": 100, "replay_buffer_size": 10_000, "patience": 0, "rollout_evaluator": None,
        "collect_ahead": False if name == "local, waiting" else None,
    }  # fmt: skip
    seeds = {"seeding.env_base_seed": 1, "seeding.agent_base_seed": 1}
    runner = name.split(",", maxsplit=1)[0]
    return RunContext(
        env=make_env, algorithm="sac", critic="flatten_concat_state_action", runner=runner, run_dir=directory,
        silent=True, overrides={**seeds, **{f"algorithm.{key}": value for key, value in values.items()}},
    )  # fmt: skip


def measure(n_steps: int, n_updates: int, n_rounds: int) -> dict[str, float]:
    """Environment steps per second of all, and the ratios to `dev`.

    :param n_steps: Number of steps of each environment per update.
    :param n_updates: Number of updates in a round.
    :param n_rounds: Number of rounds.
    """
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        runs = {
            name: stack.enter_context(training(name, n_steps, n_updates, f"{directory}/{name}")) for name in TRAININGS
        }
        seconds: dict[str, list[float]] = {name: [] for name in TRAININGS}
        for _ in range(n_rounds + 1):  # the first one sets up
            for name, run in runs.items():
                start = time.perf_counter()
                run.train(n_epochs=1)
                seconds[name].append(time.perf_counter() - start)
        one, other = (list(runs[name].runner.trainer.model.parameters()) for name in ("dev", "local, waiting"))
        assert all(map(torch.equal, one, other)), "the two have not learned the same"
    rounds = {name: values[1:] for name, values in seconds.items()}
    done = n_steps * N_ENVS * n_updates
    ratios = {
        f"{name}, ratio": median(dev / own for dev, own in zip(rounds["dev"], values, strict=True))
        for name, values in rounds.items()
    }
    return {**{f"{name}, steps per second": done / median(values) for name, values in rounds.items()}, **ratios}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10], help="steps of each environment per update")
    parser.add_argument("--updates", type=int, default=100, help="updates in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="writes the results into a file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for n_steps in arguments.steps:
        results[n_steps] = result = measure(n_steps, arguments.updates, arguments.rounds)
        cells = (
            f"{name} {result[f'{name}, steps per second']:.0f} ({result[f'{name}, ratio']:.2f})" for name in TRAININGS
        )
        print(f"{n_steps:3} steps per update, steps per second (times dev): {'; '.join(cells)}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
