"""Run modes and errors of :class:`~maze.api.run_context.RunContext`."""

from __future__ import annotations

from enum import Enum

from maze.core.errors import ConfigError, MazeError


class RunMode(Enum):
    """What a configuration is for; the values are the names of the root configurations."""

    TRAINING = "conf_train"
    ROLLOUT = "conf_rollout"


class RunContextError(MazeError):
    """A :class:`~maze.api.run_context.RunContext` cannot do what it was asked for."""


class InvalidSpecificationError(RunContextError, ConfigError):
    """Arguments of a :class:`~maze.api.run_context.RunContext` are of the wrong type or contradict each other."""
