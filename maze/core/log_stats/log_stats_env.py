"""What an environment with statistics offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from maze.core.log_stats.log_stats import LogStatsAggregator, LogStatsLevel


class LogStatsEnv(ABC):
    """Access to the statistics that an environment collects about itself."""

    @abstractmethod
    def get_stats(self, level: LogStatsLevel) -> LogStatsAggregator:
        """The aggregator of a level."""

    @abstractmethod
    def write_epoch_stats(self) -> None:
        """Reduces the episodes finished since the last call to epoch statistics and logs them."""

    @abstractmethod
    def clear_epoch_stats(self) -> None:
        """Forgets the episodes finished since the last :meth:`write_epoch_stats`."""

    @abstractmethod
    def get_stats_value(self, event: Callable[..., Any], level: LogStatsLevel, name: str | None = None) -> Any:
        """One value of the statistics that a level calculated last.

        :param event: The event's interface method.
        :param level: The level.
        :param name: The statistic's output name.
        """
