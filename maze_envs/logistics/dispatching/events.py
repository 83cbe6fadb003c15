"""Events of orders and vehicles."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats


class DispatchingEvents(ABC):
    """Orders and vehicles."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def order_assigned(self, distance: int) -> None:
        """A vehicle is on its way to an order.

        :param distance: Cells to go.
        """

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def order_lost(self) -> None:
        """No vehicle was sent in time."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def order_late(self) -> None:
        """An order was lost, or the vehicle arrives after the order's patience."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def invalid_assignment(self) -> None:
        """A vehicle was sent to an order that is not there, or is assigned already."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def vehicle_left(self) -> None:
        """A vehicle went home at the end of its shift; another one takes its place."""
