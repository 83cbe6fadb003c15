"""Run modes and errors of :class:`~maze.api.run_context.RunContext`, and the state of the process that it restores."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr
from enum import Enum
from typing import Any

from maze.console.streams import lasting_console, quiet_console
from maze.core.errors import ConfigError, MazeError, did_you_mean
from maze.train.utils.train_utils import global_generators_state, set_global_generators_state


class RunMode(Enum):
    """Purpose of a configuration; the values are the names of the root configurations."""

    TRAINING = "conf_train"
    ROLLOUT = "conf_rollout"


class RunContextError(MazeError):
    """A call of a :class:`~maze.api.run_context.RunContext` is not possible."""


class InvalidSpecificationError(RunContextError, ConfigError):
    """Arguments of a :class:`~maze.api.run_context.RunContext` are of the wrong type or contradict each other."""


def check_names(call: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise an error if a call has an unknown argument.

    :param call: Name of the call, for the message.
    :param given: Names of the given arguments.
    :param known: Names of all arguments.
    :raises InvalidSpecificationError: A given name is unknown.
    """
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidSpecificationError(f"{call}: {name}: unknown argument.{hint} Known: {', '.join(known)}.")


@contextmanager
def output(silent: bool) -> Iterator[None]:
    """Return a context in which nothing is printed if `silent`; errors of the console are ignored."""
    if not silent:
        with lasting_console():
            yield
        return
    with quiet_console(), redirect_stderr(sys.stdout), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class GlobalGenerators:
    """A run's state of the global random generators, which the run seeds and its networks and users' code use.

    Alternating runs in one process affect neither each other's generators nor those of the process.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Return a context in which the global generators have the run's last state."""
        outer = global_generators_state()
        if self._state is not None:
            set_global_generators_state(self._state)
        try:
            yield
        finally:
            self._state = global_generators_state()
            set_global_generators_state(outer)
