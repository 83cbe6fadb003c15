"""Run modes and errors of :class:`~maze.api.run_context.RunContext`."""

from __future__ import annotations

from enum import Enum

from maze.core.errors import ConfigError, MazeError


class RunMode(Enum):
    """Purpose of a configuration; the values are the names of the root configurations."""

    TRAINING = "conf_train"
    ROLLOUT = "conf_rollout"


class RunContextError(MazeError):
    """A call of a :class:`~maze.api.run_context.RunContext` is not possible."""


class InvalidSpecificationError(RunContextError, ConfigError):
    """Arguments of a :class:`~maze.api.run_context.RunContext` are of the wrong type or contradict each other."""
