"""Statistics of the environments in a vector environment, and their encoding for other processes.

A key of statistics refers to an event method. It is sent by name, once; after that, the statistics of an episode are a
list of key numbers and values.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import cloudpickle

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsKey, LogStatsLevel, event_named
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper


class SinkHoleConsumer(LogStatsConsumer):
    """Discards all statistics."""

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        pass


def disable_epoch_level_stats(env: LogStatsWrapper) -> None:
    """Stop an environment from collecting its own epoch statistics.

    If several environments share an epoch aggregator, their own aggregators are never reduced and would only grow.

    :param env: An environment with statistics.
    """
    episode_stats = env.get_stats(LogStatsLevel.EPISODE)
    with suppress(ValueError):  # it has been disabled before
        episode_stats.remove_consumer(env.get_stats(LogStatsLevel.EPOCH))
    episode_stats.register_consumer(SinkHoleConsumer())


def with_stats(env: Any) -> LogStatsWrapper:
    """Return the environment with episode statistics and without its own epoch statistics."""
    wrapped = env if isinstance(env, LogStatsWrapper) else LogStatsWrapper(env)
    disable_epoch_level_stats(wrapped)
    return wrapped


class KeyDefinition(NamedTuple):
    """A key of statistics with the name of its event.

    :param module: Module of the event method.
    :param qualified_name: Name of the method in that module.
    :param by_value: The pickled method, used if it is not found by name.
    :param rest: Output name and group.
    """

    module: str
    qualified_name: str
    by_value: bytes
    rest: tuple[Any, ...]


EncodedStats = tuple[list[KeyDefinition], list[tuple[int, Any]]]
"""Keys that were not sent before, and pairs of key number and value."""


class StatsEncoder:
    """Encodes statistics; one per connection."""

    def __init__(self) -> None:
        self._numbers: dict[LogStatsKey, int] = {}

    def encode(self, stats: LogStats) -> EncodedStats:
        """Encode the statistics of an episode."""
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
    """Decodes the results of one :class:`StatsEncoder`, in the same order."""

    def __init__(self) -> None:
        self._keys: list[LogStatsKey] = []

    def decode(self, encoded: EncodedStats) -> LogStats:
        """Decode the statistics of an episode."""
        new_keys, values = encoded
        for definition in new_keys:
            event = event_named(definition.module, definition.qualified_name)
            self._keys.append(LogStatsKey(event or cloudpickle.loads(definition.by_value), *definition.rest))
        return {self._keys[number]: value for number, value in values}
