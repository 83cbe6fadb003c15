"""Events of cutting and their statistics."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats

Size = tuple[int, int]


class CuttingEvents(ABC):
    """Attempts to cut."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_piece_selected(self) -> None:
        """The selected slot of the stock is empty."""

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
    """Changes of the stock."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def piece_discarded(self, piece: Size) -> None:
        """A piece was thrown away, because the stock was full.

        :param piece: Its size.
        """

    @define_epoch_stats(np.mean, input_name="step_mean", output_name="step_mean")
    @define_epoch_stats(max, input_name="step_max", output_name="step_max")
    @define_episode_stats(np.mean, output_name="step_mean")
    @define_episode_stats(max, output_name="step_max")
    @define_step_stats(None)
    def pieces_in_inventory(self, value: int) -> None:
        """State of the stock, reported once per step.

        :param value: Number of pieces.
        """

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def piece_replenished(self) -> None:
        """A raw piece was delivered."""
