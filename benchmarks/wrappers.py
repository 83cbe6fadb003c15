"""What a stack of wrappers costs, compared with a raw step of gymnasium's CartPole.

Every variant takes the same number of CartPole-v1 steps with random actions, resets included. Variants take turns, so
that other work on the machine hits all of them; the table shows medians and their ratios to the bare environment.

    python benchmarks/wrappers.py            # about half a minute
    python benchmarks/wrappers.py --quick --json wrappers.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np

from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper_factory import WrapperFactory

ENV_ID = "CartPole-v1"
BARE = "gymnasium.make"
LIMIT = 4.0
"""What each stack of five may cost at most, in bare environment steps."""

Variant = Callable[[int], None]

TIME_LIMIT = {"TimeLimitWrapper": {"max_episode_steps": 200}}
SCALING = {"RewardScalingWrapper": {"scale": 0.1}}
CLIPPING = {"RewardClippingWrapper": {"min_val": -1.0, "max_val": 1.0}}
RETURNS = {"ReturnNormalizationRewardWrapper": {"gamma": 0.99, "epsilon": 1e-8}}
RANDOM_RESET = {"RandomResetWrapper": {"min_skip_steps": 0, "max_skip_steps": 5}}
STATISTICS: dict[str, Any] = {"LogStatsWrapper": {}}
STACK = {"ObservationStackWrapper": {"stack_config": [{"observation": "observation", "stack_steps": 4}]}}
PRE_PROCESSING = {
    "PreProcessingWrapper": {
        "pre_processor_mapping": [
            {"observation": "observation", "_target_": "maze.preprocessors.UnSqueezePreProcessor", "config": {"dim": 0}}
        ]
    }
}
NORMALIZATION = {
    "ObservationNormalizationWrapper": {
        "default_strategy": "maze.normalization_strategies.MeanZeroStdOneObservationNormalizationStrategy",
        "default_strategy_config": {"clip_range": [-5, 5], "axis": None},
        "default_statistics": {"mean": 0.1, "std": 0.8},
    }
}

SINGLE = (TIME_LIMIT, SCALING, RETURNS, PRE_PROCESSING, STACK, NORMALIZATION, STATISTICS)
STACKS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "five: rewards and episodes": (RANDOM_RESET, TIME_LIMIT, SCALING, CLIPPING, STATISTICS),
    "five: usual training": (NORMALIZATION, TIME_LIMIT, SCALING, CLIPPING, STATISTICS),
    "five: the costliest": (STACK, PRE_PROCESSING, NORMALIZATION, RETURNS, STATISTICS),
}


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


def wrapped_steps(wrappers: Sequence[Mapping[str, Any]]) -> Variant:
    """Steps a Maze environment in wrappers, with the same actions."""
    env: Any = WrapperFactory.wrap_from_config(GymMazeEnv(ENV_ID), list(wrappers))
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
    single = {name: wrapped_steps([wrapper]) for wrapper in SINGLE for name in wrapper}
    stacks = {name: wrapped_steps(wrappers) for name, wrappers in STACKS.items()}
    return {BARE: bare_steps(), "GymMazeEnv": wrapped_steps([]), **single, **stacks}


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
        limit = f"{LIMIT:.1f}" if name in STACKS else ""
        lines.append(f"{name:<36}{value:>9.2f}{value / medians[BARE]:>8.2f}{limit:>8}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    :return: Exit status; 1 if a stack exceeds its limit.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few seconds, less exact")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write medians (µs per step) and ratios there")
    options = parser.parse_args(arguments)

    medians = measure(n_steps=2_000, n_rounds=5) if options.quick else measure(n_steps=10_000, n_rounds=15)
    print(table(medians))
    ratios = {name: value / medians[BARE] for name, value in medians.items()}
    if options.json is not None:
        options.json.write_text(json.dumps({"microseconds_per_step": medians, "ratios": ratios}, indent=2) + "\n")
    return int(any(ratios[name] > LIMIT for name in STACKS))


if __name__ == "__main__":
    sys.exit(main())
