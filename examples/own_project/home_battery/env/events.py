"""What happens in the house."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats


class BatteryEvents(ABC):
    """The battery and the bill."""

    @define_epoch_stats(np.mean, input_name="cost", output_name="mean_cost")
    @define_epoch_stats(np.mean, input_name="without", output_name="mean_cost_without_battery")
    @define_episode_stats(sum, input_name="cost", output_name="cost")
    @define_episode_stats(sum, input_name="without", output_name="without")
    @define_step_stats(sum, input_name="cost", output_name="cost")
    @define_step_stats(sum, input_name="cost_without_battery", output_name="without")
    def hour_billed(self, cost: float, cost_without_battery: float) -> None:
        """An hour is over.

        :param cost: What the energy of the hour cost; negative: it was sold.
        :param cost_without_battery: What it would have cost.
        """

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def limit_hit(self, wanted: float, done: float) -> None:
        """The battery was too full or too empty for what it was to do.

        :param wanted: kWh to be charged (negative: discharged).
        :param done: kWh that it took or gave.
        """
