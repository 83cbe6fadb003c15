"""Shared code of environment benchmarks: variants that alternately step CartPole-v1 with the same actions.

Variants take turns, so that other work on the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np

ENV_ID = "CartPole-v1"
BARE = "gymnasium.make"

Variant = Callable[[int], None]
"""Takes a number of steps."""


def bare_steps() -> Variant:
    """Step the environment as gymnasium makes it."""
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
    """Step a Maze environment with the same actions, packed as its action space wants them."""
    env.seed(0)
    env.reset()
    actions = [{"action": action} for action in np.random.default_rng(0).integers(2, size=1024)]

    def run(n_steps: int) -> None:
        step, reset = env.step, env.reset
        for index in range(n_steps):
            if step(actions[index & 1023])[2]:
                reset()

    return run


def measure(variants: Mapping[str, Variant], n_steps: int, n_rounds: int) -> dict[str, float]:
    """Median microseconds per step of each variant.

    :param variants: What is timed.
    :param n_steps: Steps of a variant in its turn.
    :param n_rounds: Turns of each variant, after one to warm up.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_index in range(n_rounds + 1):
        for name, run in variants.items():
            start = time.perf_counter()
            run(n_steps)
            if round_index > 0:
                times[name].append((time.perf_counter() - start) / n_steps * 1e6)
    return {name: median(values) for name, values in times.items()}


def table(medians: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """The medians and their ratios to the bare environment as text."""
    lines = [f"{'variant':<36}{'µs/step':>9}{'ratio':>8}{'limit':>8}"]
    for name, value in medians.items():
        limit = f"{limits[name]:.1f}" if name in limits else ""
        lines.append(f"{name:<36}{value:>9.2f}{value / medians[BARE]:>8.2f}{limit:>8}")
    return "\n".join(lines)


def main(
    description: str | None,
    variants: Mapping[str, Variant],
    limits: Mapping[str, float],
    steps: int,
    quick_steps: int,
    arguments: Sequence[str] | None = None,
) -> int:
    """Command line of a benchmark.

    :param description: What ``--help`` says.
    :param variants: What is timed, the bare environment among it.
    :param limits: What variants may cost at most, in bare environment steps.
    :param steps: Steps of a variant in each of 15 turns.
    :param quick_steps: With ``--quick``, in each of 5.
    :param arguments: Arguments; by default those of the process.
    :return: Exit status; 1 if a variant exceeds its limit.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians (µs per step) and ratios there")
    options = parser.parse_args(arguments)

    medians = measure(variants, quick_steps, 5) if options.quick else measure(variants, steps, 15)
    print(table(medians, limits))
    ratios = {name: value / medians[BARE] for name, value in medians.items()}
    if options.json is not None:
        options.json.write_text(json.dumps({"microseconds_per_step": medians, "ratios": ratios}, indent=2) + "\n")
    return int(any(ratios[name] > limit for name, limit in limits.items()))
