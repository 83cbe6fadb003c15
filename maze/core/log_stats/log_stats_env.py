"""Interface of environments with statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel


class LogStatsEnv(ABC):
    """Environment that collects statistics."""

    @abstractmethod
    def get_stats(self, level: LogStatsLevel) -> LogStatsAggregator:
        """Return the aggregator of a level.

        :param level: Step, episode or epoch.
        """

    def write_epoch_stats(self) -> None:
        """Reduce the episodes finished since the last call to epoch statistics and log them."""
        self.get_stats(LogStatsLevel.EPOCH).reduce()

    def clear_epoch_stats(self) -> None:
        """Drop the episodes finished since the last :meth:`write_epoch_stats`."""
        self.get_stats(LogStatsLevel.EPOCH).clear_inputs()

    def get_stats_value(self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None) -> Any:
        """Return one value of the latest statistics of a level.

        :param event: The event's interface method.
        :param level: The level.
        :param name: The statistic's output name.
        :raises KeyError: There is no such statistic; the message lists the existing ones.
        """
        return self.get_stats(level).last_value(event, name)
