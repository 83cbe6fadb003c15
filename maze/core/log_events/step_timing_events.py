"""How long the parts of an environment take."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)


class StepTimingEvents(ABC):
    """Time spent in an environment and in each of its wrappers, without what they wrap."""

    @define_epoch_stats(np.mean, input_name="mean", output_name="mean_ms")
    @define_epoch_stats(sum, input_name="sum", output_name="total_ms")
    @define_episode_stats(np.mean, output_name="mean")
    @define_episode_stats(sum, output_name="sum")
    @define_step_stats(sum)
    @define_stats_grouping("layer")
    def step_time(self, layer: str, value: float) -> None:
        """A step was taken.

        :param layer: The wrapper or environment; 0 is the environment itself, as in "1_TimeLimitWrapper".
        :param value: Milliseconds.
        """

    @define_epoch_stats(np.mean, output_name="mean_ms")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    @define_stats_grouping("layer")
    def reset_time(self, layer: str, value: float) -> None:
        """The environment was reset.

        :param layer: The wrapper or environment.
        :param value: Milliseconds.
        """
