"""Statistics of the environments inside a vector environment, also on their way between processes.

The keys of statistics name event methods, and both sides must mean the same function objects. They travel by name,
once; after that an episode's statistics are a short list of numbers and values.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsKey, LogStatsLevel, event_named
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper


class SinkHoleConsumer(LogStatsConsumer):
    """Swallows all statistics."""

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        pass


def disable_epoch_level_stats(env: LogStatsWrapper) -> None:
    """Stops an environment from collecting epoch statistics of its own.

    Where many environments feed one common epoch aggregator, their own ones would only grow: nobody ever reduces them.

    :param env: An environment with statistics.
    """
    episode_stats = env.get_stats(LogStatsLevel.EPISODE)
    with suppress(ValueError):  # it has been disabled before
        episode_stats.remove_consumer(env.get_stats(LogStatsLevel.EPOCH))
    episode_stats.register_consumer(SinkHoleConsumer())


def with_stats(env: Any) -> LogStatsWrapper:
    """Returns the environment with statistics of its episodes, which nobody else collects."""
    wrapped = env if isinstance(env, LogStatsWrapper) else LogStatsWrapper(env)
    disable_epoch_level_stats(wrapped)
    return wrapped


class KeyDefinition(NamedTuple):
    """A statistics key, by the name of its event.

    :param module: Module of the event method.
    :param qualified_name: Its name in that module.
    :param by_value: The pickled method, used where it cannot be found by name.
    :param rest: Output name and group.
    """

    module: str
    qualified_name: str
    by_value: bytes
    rest: tuple[Any, ...]


EncodedStats = tuple[list[KeyDefinition], list[tuple[int, Any]]]
"""Keys not sent before, and values by key number."""


class StatsEncoder:
    """Encodes statistics; one per connection."""

    def __init__(self) -> None:
        self._numbers: dict[LogStatsKey, int] = {}

    def encode(self, stats: LogStats) -> EncodedStats:
        """Encodes the statistics of an episode."""
        new_keys: list[KeyDefinition] = []
        values: list[tuple[int, Any]] = []
        for key, value in stats.items():
            number = self._numbers.get(key)
            if number is None:
                number = self._numbers[key] = len(self._numbers)
                event, *rest = key
                new_keys.append(
                    KeyDefinition(event.__module__, event.__qualname__, cloudpickle.dumps(event), tuple(rest))
                )
            values.append((number, value))
        return new_keys, values


class StatsDecoder:
    """Decodes what one :class:`StatsEncoder` encoded, in the same order."""

    def __init__(self) -> None:
        self._keys: list[LogStatsKey] = []

    def decode(self, encoded: EncodedStats) -> LogStats:
        """Decodes the statistics of an episode."""
        new_keys, values = encoded
        for definition in new_keys:
            event = event_named(definition.module, definition.qualified_name)
            self._keys.append(LogStatsKey(event or cloudpickle.loads(definition.by_value), *definition.rest))
        return {self._keys[number]: value for number, value in values}


def decoded(episodes: Iterable[EncodedStats]) -> list[LogStats]:
    """The statistics of episodes that were encoded together."""
    decoder = StatsDecoder()
    return [decoder.decode(episode) for episode in episodes]
