"""Events of a store."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats


class InventoryEvents(ABC):
    """Costs and units of a period."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(np.mean)
    @define_step_stats(sum)
    def cost(self, value: float) -> None:
        """A period ended with a cost.

        :param value: Holding, penalty and purchasing costs.
        """

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(np.mean)
    @define_step_stats(sum)
    def short(self, units: int) -> None:
        """Demand that could not be met from stock: lost, or backlogged at the end of the period.

        :param units: How much.
        """

    @define_epoch_stats(np.mean, output_name="mean")
    @define_episode_stats(np.mean)
    @define_step_stats(sum)
    def left_over(self, units: int) -> None:
        """Stock at the end of a period.

        :param units: How much.
        """
