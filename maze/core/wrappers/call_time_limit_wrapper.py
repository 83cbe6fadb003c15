"""Limits how long an environment may take for a step or a reset."""

from __future__ import annotations

import threading
from typing import Any, Union

from maze.core.annotations import override
from maze.core.env.base_env import BaseEnv
from maze.core.errors import ConfigError
from maze.core.wrappers.wrapper import EnvType, Wrapper
from maze.utils.timeout import Timeout


class CallTimeLimitWrapper(Wrapper[Union[BaseEnv, EnvType]]):
    """Raises a `TimeoutError` in a step or reset that takes too long; its traceback shows where it was.

    Native code is interrupted when it returns to Python, not before. Works in the main thread of a process on Unix, as
    in worker processes; elsewhere there is no limit.

    :param env: The environment to wrap.
    :param seconds: What a call may take; fractions are allowed.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: BaseEnv | EnvType, seconds: float) -> None:
        self.seconds = checked_time_limit("seconds", seconds)
        super().__init__(env)

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        return self._limited("step", self._env_step, action)

    @override(Wrapper)
    def reset(self, *args: Any, **kwargs: Any) -> Any:
        return self._limited("reset", self._env_reset, *args, **kwargs)

    def _limited(self, name: str, call: Any, *args: Any, **kwargs: Any) -> Any:
        if self.seconds is None or threading.current_thread() is not threading.main_thread():
            return call(*args, **kwargs)
        with Timeout(self.seconds, f"`{name}` takes longer than the limit of {self.seconds:g} s"):
            return call(*args, **kwargs)


def checked_time_limit(name: str, seconds: Any) -> float | None:
    """Returns a time limit in seconds; `None` where there is none.

    :param name: Where it comes from, for the error message.
    :param seconds: A positive number, or `None`.
    :raises ConfigError: It is something else.
    """
    if seconds is None:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"{name}: expected a positive number of seconds, or null for no limit; got {seconds!r}.")
    return float(seconds)
