"""The errors that a user, a file or another process can cause.

``assert`` guards what our own code guarantees; everything else is one of these, says where it happened, what was
expected, what was found and what to do, and keeps its cause (``raise ... from``).
"""

from __future__ import annotations


class MazeError(Exception):
    """Common base: the command line prints it as one message, without a traceback."""


class ConfigError(MazeError):
    """A configuration value is missing, unknown, of the wrong type or out of range."""


class EnvironmentContractError(MazeError):
    """An environment breaks its contract (spaces, actors, rewards); the message names environment, sub-step and key."""


class NonFiniteError(MazeError):
    """A reward, observation, logit, loss or gradient is NaN or infinite; raised before any parameter changes."""


class WorkerError(MazeError):
    """A worker process failed: names its index, pid, exit code or signal, the call it was in, and its traceback."""


class CheckpointError(MazeError):
    """A checkpoint or another artefact is missing, damaged, foreign or does not fit the model."""
