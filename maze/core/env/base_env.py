"""Basic interface of environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class BaseEnv(ABC):
    """Environment with Maze's step protocol: `reset` returns the observation, `step` four values."""

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        """Take one step.

        :param action: Action of the current actor.
        :return: Observation of the next actor, reward, whether the episode has ended, and further information.
            `info["TimeLimit.truncated"]` is True if the episode was truncated and did not terminate.
        """

    @abstractmethod
    def reset(self) -> Any:
        """Start a new episode.

        :return: The first observation.
        """

    @abstractmethod
    def seed(self, seed: Any) -> None:
        """Seed the random generators; the next `reset` starts the seeded sequence of episodes.

        :param seed: A non-negative integer; vector environments take one for each environment.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the resources of the environment. May be called more than once."""


TRUNCATION_KEY = "TimeLimit.truncated"
"""Key of `info` that is True if an episode was truncated and did not terminate."""


def is_truncated(done: bool, info: Mapping[Any, Any] | None) -> bool:
    """Return whether a step with `done` and `info` truncated the episode.

    An episode that has ended without truncation has terminated: its last value is zero, without bootstrapping.

    :param done: Whether the episode has ended.
    :param info: The `info` of the step; `None`: it has none.
    """
    return bool(done and info and info.get(TRUNCATION_KEY, False))


def reset_values(result: Any) -> tuple[Any, dict[str, Any]]:
    """Return the first observation and `info`, which is empty if `reset` returns the observation only.

    :param result: Result of `reset`.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    return result if is_pair else (result, {})
