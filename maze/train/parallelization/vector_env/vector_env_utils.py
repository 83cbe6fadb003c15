"""Helpers around the statistics of the environments inside a vector environment."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsLevel
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
