"""Limit the length of episodes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar

from maze.core.annotations import override
from maze.core.env.base_env import TRUNCATION_KEY, BaseEnv
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.utils.config_utils import number, whole_number
from maze.core.wrappers.wrapper import PassiveWrapper, Wrapper
from maze.utils.timeout import Timeout


class TimeLimitWrapper(Wrapper[Any], BaseEnv):
    """Truncate episodes after a number of environment steps.

    An episode that terminates in its last permitted step is not truncated. Sub-steps do not count; for environments
    without `get_env_time`, calls of `step` do.

    :param env: The environment to wrap, a Maze or a gymnasium one.
    :param max_episode_steps: Environment steps of an episode; None or 0: no limit.
    """

    keeps_observations_and_actions = True

    CLONED = ("_elapsed_steps", "_max_episode_steps", "_next_seed")

    TRANSIENT: ClassVar[tuple[str, ...]] = (*Wrapper.TRANSIENT, "_get_env_time")

    def __init__(self, env: Any, max_episode_steps: int | None = None) -> None:
        self.set_max_episode_steps(max_episode_steps)
        self._elapsed_steps = 0
        self.n_cut_off = 0
        """Number of truncated episodes so far."""
        self._next_seed: int | None = None
        super().__init__(env)

    @override(Wrapper)
    def _bind(self) -> None:
        super()._bind()
        self._get_env_time = self.env.get_env_time if isinstance(self.env, TimeEnvMixin) else None

    def set_max_episode_steps(self, max_episode_steps: int | None) -> None:
        """Set the limit, valid from the next step on.

        :param max_episode_steps: Environment steps of an episode; None or 0: no limit.
        :raises ConfigError: It is negative, or not a whole number.
        """
        limit = whole_number("TimeLimitWrapper.max_episode_steps", max_episode_steps or 0, at_least=0)
        self._max_episode_steps = limit or None

    def remaining_steps(self) -> int | None:
        """Return the environment steps until the episode is truncated; None: there is no limit."""
        return None if self._max_episode_steps is None else self._max_episode_steps - self._elapsed()

    def _elapsed(self) -> int:
        return self._elapsed_steps if self._get_env_time is None else self._get_env_time()

    @override(BaseEnv)
    def step(self, action: Any) -> Any:
        result = self._env_step(action)
        self._elapsed_steps += 1
        limit = self._max_episode_steps
        if limit is None or self._elapsed() < limit:
            return result
        if self._context is not None:
            self._context.is_episode_over = True
        self.n_cut_off += not (result[2] or (len(result) == 5 and result[3]))
        if len(result) == 5:
            observation, reward, terminated, truncated, info = result
            return observation, reward, terminated, truncated or not terminated, info
        observation, reward, done, info = result
        # A copy: an environment that returns one object in all steps would keep the entry in later episodes.
        return observation, reward, True, info if done else {**(info or {}), TRUNCATION_KEY: True}

    @override(BaseEnv)
    def reset(self, **kwargs: Any) -> Any:
        self._elapsed_steps = 0
        if self._next_seed is not None:
            kwargs.setdefault("seed", self._next_seed)
            self._next_seed = None
        return self._env_reset(**kwargs)

    @override(BaseEnv)
    def seed(self, seed: Any) -> None:
        if self._is_gymnasium and not hasattr(self.env, "seed"):
            self._next_seed = seed  # gymnasium is seeded at the next reset
        else:
            self.env.seed(seed)

    @override(BaseEnv)
    def close(self) -> None:
        self.env.close()


def time_limited(env_factory: Callable[[], Any], max_episode_steps: int) -> Any:
    """Make an environment with a time limit.

    :param env_factory: Makes the environment.
    :param max_episode_steps: See :class:`TimeLimitWrapper`.
    """
    return TimeLimitWrapper.wrap(env_factory(), max_episode_steps=max_episode_steps)


class CallTimeLimitWrapper(PassiveWrapper[Any]):
    """Raise a `TimeoutError` in a step or reset that takes too long; its traceback shows the position.

    Native code is interrupted when it returns to Python, not before. The limit applies in the main thread of a process
    on Unix, which includes worker processes.

    :param env: The environment to wrap.
    :param seconds: Longest duration of a call; fractions are allowed.
    """

    def __init__(self, env: Any, seconds: float) -> None:
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
    """Return a time limit in seconds; `None` where there is none.

    :param name: Key of the configuration, for the error message.
    :param seconds: A positive number, or `None`.
    :raises ConfigError: `seconds` is neither.
    """
    return None if seconds is None else float(number(name, seconds, 0.0, above=True))
