"""What a Maze environment costs beyond the gymnasium environment inside it.

Every variant takes the same number of CartPole-v1 steps with random actions, resets included. Variants take turns, so
that other work on the machine hits all of them; the table shows medians and their ratios to the bare environment.

    python benchmarks/env_layer.py            # about half a minute
    python benchmarks/env_layer.py --quick --json env_layer.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np

from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

ENV_ID = "CartPole-v1"
BARE = "gymnasium.make"
LIMITS = {"GymMazeEnv": 2.0, "LogStatsWrapper": 3.5}
"""What the variants may cost at most, in bare environment steps."""

Variant = Callable[[int], None]


def bare_steps() -> Variant:
    """Steps the environment as gymnasium makes it."""
    env = gymnasium.make(ENV_ID)
    env.reset(seed=0)
    actions = np.random.default_rng(0).integers(2, size=1024).tolist()

    def run(n_steps: int) -> None:
        step, reset = env.step, env.reset
        for index in range(n_steps):
            _, _, terminated, truncated, _ = step(actions[index & 1023])
            if terminated or truncated:
                reset()

    return run


def maze_steps(env: Any) -> Variant:
    """Steps a Maze environment with the same actions, packed as its action space wants them."""
    env.seed(0)
    env.reset()
    actions = [{"action": action} for action in np.random.default_rng(0).integers(2, size=1024)]

    def run(n_steps: int) -> None:
        step, reset = env.step, env.reset
        for index in range(n_steps):
            if step(actions[index & 1023])[2]:
                reset()

    return run


def variants() -> dict[str, Variant]:
    """All variants by name, the bare environment first."""
    limited: Any = TimeLimitWrapper.wrap(GymMazeEnv(ENV_ID), max_episode_steps=200)
    return {
        BARE: bare_steps(),
        "GymMazeEnv": maze_steps(GymMazeEnv(ENV_ID)),
        "TimeLimitWrapper": maze_steps(TimeLimitWrapper(GymMazeEnv(ENV_ID), max_episode_steps=200)),
        "LogStatsWrapper": maze_steps(LogStatsWrapper(GymMazeEnv(ENV_ID))),
        "LogStatsWrapper, TimeLimitWrapper": maze_steps(LogStatsWrapper.wrap(limited)),
    }


def measure(n_steps: int, n_rounds: int) -> dict[str, float]:
    """Median microseconds per step of each variant.

    :param n_steps: Steps of a variant in its turn.
    :param n_rounds: Turns of each variant, after one to warm up.
    """
    candidates = variants()
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_index in range(n_rounds + 1):
        for name, run in candidates.items():
            start = time.perf_counter()
            run(n_steps)
            if round_index > 0:
                times[name].append((time.perf_counter() - start) / n_steps * 1e6)
    return {name: median(values) for name, values in times.items()}


def table(medians: dict[str, float]) -> str:
    """The medians as text."""
    lines = [f"{'variant':<36}{'µs/step':>9}{'ratio':>8}{'limit':>8}"]
    for name, value in medians.items():
        limit = f"{LIMITS[name]:.1f}" if name in LIMITS else ""
        lines.append(f"{name:<36}{value:>9.2f}{value / medians[BARE]:>8.2f}{limit:>8}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    :return: Exit status; 1 if a variant exceeds its limit.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians (µs per step) and ratios there")
    options = parser.parse_args(arguments)

    medians = measure(n_steps=5_000, n_rounds=5) if options.quick else measure(n_steps=20_000, n_rounds=15)
    print(table(medians))
    ratios = {name: value / medians[BARE] for name, value in medians.items()}
    if options.json is not None:
        options.json.write_text(json.dumps({"microseconds_per_step": medians, "ratios": ratios}, indent=2) + "\n")
    return int(any(ratios[name] > limit for name, limit in LIMITS.items()))


if __name__ == "__main__":
    raise SystemExit(main())
