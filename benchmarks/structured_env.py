"""Time of sub-steps of structured environments relative to steps of flat ones.

The tutorial's cutting problem, flat and with two sub-steps, is stepped in a vector environment with statistics, as in
training. The runs alternate on the same core; medians are printed. The time of the simulation counts in both: it acts
once per step, and so once in two sub-steps.

    python benchmarks/structured_env.py [--quick] [--json FILE]
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

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "tutorials"))

N_ENVS = 8
LARGEST_RATIO = 1.3
PROBLEM: dict[str, Any] = {
    "max_pieces_in_inventory": 200,
    "raw_piece_size": (100, 90),
    "static_demand": [(60, 30), (40, 30)],
}


def make(kind: str) -> Any:
    """One environment as in training."""
    from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
    from tutorial_maze_env.part06_struct_env.env.maze_env import maze_env_factory
    from tutorial_maze_env.part06_struct_env.env.struct_env import struct_env_factory
    from tutorial_maze_env.part06_struct_env.env.struct_env_masked import struct_env_factory as masked_env_factory

    factories: dict[str, Callable[..., Any]] = {
        "flat": maze_env_factory,
        "structured": struct_env_factory,
        "masked": masked_env_factory,
    }
    return TimeLimitWrapper.wrap(factories[kind](**PROBLEM), max_episode_steps=180)


def seconds_per_sub_step(kind: str, n_steps: int) -> float:
    """Mean over all environments; the policy takes the first piece, which costs nothing."""
    from maze.train.parallelization.vector_env.sequential_vector_env import SequentialVectorEnv

    env = SequentialVectorEnv([lambda: make(kind)] * N_ENVS)
    env.seed(list(range(N_ENVS)))
    out = {
        key: {name: np.zeros((N_ENVS, *(sub.shape or ())), sub.dtype) for name, sub in space.items()}
        for key, space in env.observation_spaces_dict.items()
    }
    actions = {
        key: {name: np.zeros(N_ENVS, np.int64) for name in space} for key, space in env.action_spaces_dict.items()
    }
    env.reset(out=out)
    n_sub_steps = n_steps * len(actions)
    keys = list(actions)
    start = time.perf_counter()
    for index in range(n_sub_steps):
        env.step(actions[keys[index % len(keys)]], out=out)
    seconds = time.perf_counter() - start
    env.close()
    return seconds / (n_sub_steps * N_ENVS)


def measure(n_steps: int, n_repeats: int) -> dict[str, float]:
    """Microseconds per sub-step, and ratios."""
    kinds = ("flat", "structured", "masked")
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(n_repeats):
        for kind in kinds:
            seconds[kind].append(seconds_per_sub_step(kind, n_steps))
    ratios = {
        f"{kind}_vs_flat": statistics.median(
            own / flat for own, flat in zip(seconds[kind], seconds["flat"], strict=True)
        )
        for kind in kinds[1:]
    }
    return {**{f"{kind}_us": statistics.median(values) * 1e6 for kind, values in seconds.items()}, **ratios}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 when sub-steps cost too much."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds, rough figures")
    parser.add_argument("--json", type=Path, help="also write the figures into this file")
    options = parser.parse_args(arguments)
    figures = measure(180, 3) if options.quick else measure(720, 9)
    print(f"{N_ENVS} environments; microseconds per sub-step, and ratios to the flat environment (at most 1.3)")
    for name, value in figures.items():
        print(f"  {name:24s} {value:10.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
    return int(max(figures["structured_vs_flat"], figures["masked_vs_flat"]) > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
