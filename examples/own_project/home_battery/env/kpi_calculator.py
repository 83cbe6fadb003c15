"""What the owner of the house wants to know."""

from __future__ import annotations

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator

from .events import BatteryEvents


class BatteryKpiCalculator(KpiCalculator):
    """The bill per day, what the battery saves of it, and how often it is told to do what it cannot."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        bills = [event.attributes for event in episode_event_log.query_events(BatteryEvents.hour_billed)]
        n_limits_hit = sum(1 for _ in episode_event_log.query_events(BatteryEvents.limit_hit))
        n_days = len(bills) / 24
        cost = sum(bill["cost"] for bill in bills) / n_days
        without = sum(bill["cost_without_battery"] for bill in bills) / n_days
        return {
            "cost_per_day": cost,
            "saved_per_day": without - cost,
            "limits_hit_per_day": n_limits_hit / n_days,
        }
