"""Events and key performance indicators."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.env.maze_state import MazeStateType
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats


class StockroomEvents(ABC):
    """Deliveries and customers."""

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def delivered(self, product: int, units: int) -> None:
        """A delivery arrived.

        :param product: Index of the product.
        :param units: Delivered units.
        """

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_order(self, product: int, units: int) -> None:
        """An order exceeded the free space of the shelf; the excess is returned.

        :param product: Index of the product.
        :param units: Returned units.
        """

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(sum)
    @define_step_stats(sum, input_name="sold")
    @define_step_stats(sum, input_name="lost")
    def day_over(self, sold: int, lost: int, profit: float) -> None:
        """A day ended.

        :param sold: Units, of all products.
        :param lost: Units of unmet demand.
        :param profit: Of the day, in EUR.
        """


class StockroomKpis(KpiCalculator):
    """Key performance indicators of an episode."""

    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        days = episode_event_log.query_events(StockroomEvents.day_over)
        n_days, sold = max(1, len(days)), sum(day.sold for day in days)
        asked_for = sold + sum(day.lost for day in days)
        return {
            "profit_per_day": sum(day.profit for day in days) / n_days,
            "service_level": sold / max(1, asked_for),
            "deliveries_per_day": len(episode_event_log.query_events(StockroomEvents.delivered)) / n_days,
        }
