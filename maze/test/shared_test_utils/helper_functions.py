"""Environments to try things out with."""

from __future__ import annotations

from maze.core.env.maze_env import MazeEnv
from maze.test.shared_test_utils.dummy_env.dummy_core_env import (
    DummyActionConversion,
    DummyCoreEnv,
    DummyObservationConversion,
)


def build_dummy_maze_env() -> MazeEnv[DummyCoreEnv]:
    """Return an environment that shows a number, which the agent has to name."""
    return MazeEnv(DummyCoreEnv(), {0: DummyActionConversion()}, {0: DummyObservationConversion()})
