"""The least that makes something an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class BaseEnv(ABC):
    """Environment with Maze's step protocol: `reset` gives the observation, `step` four values."""

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        """Takes one step.

        :param action: What the current actor does.
        :return: Observation of the actor that acts next, reward, whether the episode is over, and further information.
            `info["TimeLimit.truncated"]` is True when the episode was cut off and did not terminate.
        """

    @abstractmethod
    def reset(self) -> Any:
        """Starts a new episode.

        :return: The first observation.
        """

    @abstractmethod
    def seed(self, seed: Any) -> None:
        """Seeds the random generators; the next `reset` starts the seeded sequence of episodes."""

    @abstractmethod
    def close(self) -> None:
        """Releases whatever the environment holds. May be called more than once."""


TRUNCATION_KEY = "TimeLimit.truncated"
"""Key of `info` that is True where an episode was cut off and did not terminate."""


def is_truncated(done: bool, info: Mapping[Any, Any]) -> bool:
    """Whether the step that gave `done` and `info` cut the episode off.

    An episode that is over and not truncated has terminated: its last state has no future, and nothing may be
    bootstrapped from it.
    """
    return bool(done) and bool(info.get(TRUNCATION_KEY, False))
