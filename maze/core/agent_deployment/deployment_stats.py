"""Statistics of the episodes that a deployed agent has finished."""

from __future__ import annotations

from collections import deque

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsAggregator, LogStatsConsumer, LogStatsLevel


class DeploymentStats(LogStatsConsumer):
    """Keeps the statistics of the latest episodes; a deployment may go on for ever.

    :param window: Number of episodes.
    """

    def __init__(self, window: int) -> None:
        self.n_episodes = 0
        """Episodes since the beginning."""
        self._episodes: deque[LogStats] = deque(maxlen=window)

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        self.n_episodes += 1
        self._episodes.append(stat)

    def aggregator(self, level: LogStatsLevel) -> LogStatsAggregator:
        """The statistics of the last episode, or over the latest ones (epoch)."""
        aggregator = LogStatsAggregator(level)
        if level is LogStatsLevel.EPISODE:
            aggregator.last_stats = dict(self._episodes[-1]) if self._episodes else {}
        elif self._episodes:
            for stats in self._episodes:
                aggregator.receive(stats)
            aggregator.reduce()
        return aggregator
