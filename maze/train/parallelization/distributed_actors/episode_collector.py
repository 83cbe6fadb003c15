"""Statistics of the episodes that actors or workers collect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel, LogStatsValue, get_stats_logger
from maze.core.wrappers.log_stats_wrapper import stats_value


class EpisodeCollector:
    """What collects the episodes of a training, and keeps their statistics."""

    def __init__(self) -> None:
        self.epoch_stats = LogStatsAggregator(LogStatsLevel.EPOCH, get_stats_logger("train"))
        """Statistics of the episodes that ended in this epoch."""

    def get_epoch_stats_aggregator(self) -> LogStatsAggregator:
        """The statistics of all environments together."""
        return self.epoch_stats

    def get_stats_value(
        self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None
    ) -> LogStatsValue:
        """One value of the last epoch's statistics.

        :param event: Interface method of the event.
        :param level: Level of the statistics: there are those of epochs only.
        :param name: Output name of the statistic.
        :raises ValueError: The level is not that of epochs.
        """
        if level is not LogStatsLevel.EPOCH:
            raise ValueError(f"Distributed actors keep statistics of epochs only, not on the level {level.name}.")
        value: LogStatsValue = stats_value(self.epoch_stats, event, name)
        return value

    def write_epoch_stats(self) -> None:
        """Passes the statistics of the epoch on to the writers, and begins the next one."""
        self.epoch_stats.reduce()
