"""Time of stacks of wrappers relative to a raw step of gymnasium's CartPole.

Every variant takes the same number of CartPole-v1 steps with random actions, resets included. Variants take turns, so
that other work on the machine hits all of them; the table shows medians and their ratios to the bare environment.

    python benchmarks/wrappers.py            # about half a minute
    python benchmarks/wrappers.py --quick --json wrappers.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from step_timing import BARE, ENV_ID, Variant, bare_steps, maze_steps
from step_timing import main as timing_main

from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper_factory import WrapperFactory

LIMIT = 4.0
"""What each stack of five may cost at most, in bare environment steps."""

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


def wrapped(*wrappers: Mapping[str, Any]) -> Any:
    """The environment in wrappers, the innermost first."""
    return WrapperFactory.wrap_from_config(GymMazeEnv(ENV_ID), list(wrappers))


def variants() -> dict[str, Variant]:
    """All variants by name, the bare environment first."""
    single = {name: maze_steps(wrapped(wrapper)) for wrapper in SINGLE for name in wrapper}
    stacks = {name: maze_steps(wrapped(*wrappers)) for name, wrappers in STACKS.items()}
    return {BARE: bare_steps(), "GymMazeEnv": maze_steps(wrapped()), **single, **stacks}


if __name__ == "__main__":
    sys.exit(timing_main(__doc__, variants(), dict.fromkeys(STACKS, LIMIT), steps=10_000, quick_steps=2_000))
