"""Wrappers that learn statistics from the steps they see: freezing them, saving and restoring what they learned."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from maze.core.errors import CheckpointError
from maze.core.wrappers.wrapper import Wrapper


class RunningStatistics(ABC):
    """Mixin of wrappers whose conversion depends on statistics of all steps so far."""

    @abstractmethod
    def freeze_statistics(self) -> None:
        """Stops learning, for evaluation and rollouts; what was learned goes on to be used."""

    @abstractmethod
    def statistics_state(self) -> dict[str, float]:
        """What was learned, in plain numbers."""

    @abstractmethod
    def load_statistics_state(self, state: Mapping[str, float]) -> None:
        """Continues from a state of :meth:`statistics_state`."""


def wrappers_with_statistics(env: Any) -> Iterator[RunningStatistics]:
    """The wrappers of an environment that learn statistics, from the outermost inwards."""
    while issubclass(type(env), Wrapper):
        if issubclass(type(env), RunningStatistics):
            yield env
        env = env.env


def freeze_statistics(env: Any) -> None:
    """Has all wrappers of an environment stop learning statistics."""
    for wrapper in wrappers_with_statistics(env):
        wrapper.freeze_statistics()


def statistics_states(env: Any) -> list[dict[str, float]]:
    """What the wrappers of an environment have learned, from the outermost inwards."""
    return [wrapper.statistics_state() for wrapper in wrappers_with_statistics(env)]


def load_statistics_states(env: Any, states: list[dict[str, float]]) -> None:
    """Restores what :func:`statistics_states` gave.

    :param env: Environment wrapped in the same way.
    :param states: The states.
    :raises CheckpointError: The environment has other wrappers with statistics.
    """
    wrappers = list(wrappers_with_statistics(env))
    if len(wrappers) != len(states):
        raise CheckpointError(
            f"The checkpoint has statistics of {len(states)} wrappers, but the environment has {len(wrappers)} "
            f"wrappers with statistics: {[type(wrapper).__name__ for wrapper in wrappers]}. Configure the wrappers of "
            "the run that wrote it."
        )
    for wrapper, state in zip(wrappers, states, strict=True):
        wrapper.load_statistics_state(state)


class FrozenEnvFactory:
    """Makes environments for evaluation: their wrappers learn no statistics. A class, so that it can be pickled.

    :param env_factory: Makes an environment.
    """

    def __init__(self, env_factory: Callable[[], Any]) -> None:
        self.env_factory = env_factory

    def __call__(self) -> Any:
        env = self.env_factory()
        freeze_statistics(env)
        return env
