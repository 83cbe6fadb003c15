"""Events of the cutting environment and their statistics."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze_envs.logistics.cutting_2d.env.maze_state import Size


class CuttingEvents(ABC):
    """Attempts to cut."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_piece_selected(self) -> None:
        """The selected slot of the inventory is empty."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def valid_cut(self, current_demand: Size, piece_to_cut: Size, raw_piece_size: Size) -> None:
        """The order was cut.

        :param current_demand: Size of the order.
        :param piece_to_cut: Size of the piece it was cut from.
        :param raw_piece_size: Size of a raw piece.
        """

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_cut(self, current_demand: Size, piece_to_cut: Size, raw_piece_size: Size) -> None:
        """The selected piece is too small.

        :param current_demand: Size of the order.
        :param piece_to_cut: Size of the selected piece.
        :param raw_piece_size: Size of a raw piece.
        """


class InventoryEvents(ABC):
    """Changes of the inventory."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def piece_discarded(self, piece: Size) -> None:
        """A piece was thrown away, because the inventory was full.

        :param piece: Its size.
        """

    @define_epoch_stats(np.mean, input_name="step_mean", output_name="step_mean")
    @define_epoch_stats(max, input_name="step_max", output_name="step_max")
    @define_episode_stats(np.mean, output_name="step_mean")
    @define_episode_stats(max, output_name="step_max")
    @define_step_stats(None)
    def pieces_in_inventory(self, value: int) -> None:
        """State of the inventory, reported once per step.

        :param value: Number of pieces.
        """

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def piece_replenished(self) -> None:
        """A raw piece was delivered."""


class Cutting2dKpiCalculator(KpiCalculator):
    """Raw pieces used per step, and the share of orders that were fulfilled."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        n_steps = max(1, len(episode_event_log.step_event_logs))
        n_raw_pieces = sum(1 for _ in episode_event_log.query_events(InventoryEvents.piece_replenished))
        n_cuts = sum(1 for _ in episode_event_log.query_events(CuttingEvents.valid_cut))
        return {"raw_piece_usage_per_step": n_raw_pieces / n_steps, "fulfilled_orders": n_cuts / n_steps}
