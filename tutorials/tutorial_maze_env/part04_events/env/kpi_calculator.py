"""Key performance indicators."""

from __future__ import annotations

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator

from .events import InventoryEvents


class Cutting2dKpiCalculator(KpiCalculator):
    """Raw pieces used per step."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        n_steps = len(episode_event_log.step_event_logs)
        n_raw_pieces = sum(1 for _ in episode_event_log.query_events(InventoryEvents.piece_replenished))
        return {"raw_piece_usage_per_step": n_raw_pieces / n_steps}
