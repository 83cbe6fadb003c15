"""Time of a Maze environment relative to its gymnasium environment.

Every variant takes the same number of CartPole-v1 steps with random actions, resets included. Variants take turns, so
that other work on the machine hits all of them; the table shows medians and their ratios to the bare environment.

    python benchmarks/env_layer.py            # about half a minute
    python benchmarks/env_layer.py --quick --json env_layer.json
"""

from __future__ import annotations

import sys
from typing import Any

from step_timing import BARE, ENV_ID, Variant, bare_steps, maze_steps
from step_timing import main as timing_main

from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper

LIMITS = {"GymMazeEnv": 2.0, "LogStatsWrapper": 3.5}
"""What the variants may cost at most, in bare environment steps."""


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


if __name__ == "__main__":
    sys.exit(timing_main(__doc__, variants(), LIMITS, steps=20_000, quick_steps=5_000))
