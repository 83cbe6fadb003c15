"""Events of all environments."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import numpy as np

from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)


def latest(values: Sequence[Any]) -> Any:
    """Return the last of the values; for events that occur once."""
    return values[-1]


class BaseEnvEvents(ABC):
    """Reward and key performance indicators."""

    @define_epoch_stats(max, input_name="sum", output_name="max")
    @define_epoch_stats(min, input_name="sum", output_name="min")
    @define_epoch_stats(np.mean, input_name="sum", output_name="mean")
    @define_epoch_stats(np.std, input_name="sum", output_name="std")
    @define_epoch_stats(len, input_name="sum", output_name="episode_count")
    @define_epoch_stats(len, input_name="sum", output_name="total_episode_count", cumulative=True)
    @define_epoch_stats(sum, input_name="count", output_name="total_step_count", cumulative=True)
    @define_epoch_stats(np.mean, input_name="count", output_name="mean_step_count")
    @define_epoch_stats(np.median, input_name="count", output_name="median_step_count")
    @define_episode_stats(len, output_name="count")
    @define_episode_stats(sum, output_name="sum")
    @define_step_stats(sum)
    def reward(self, value: float) -> None:
        """The reward of an environment step, fired once when the step is complete.

        :param value: Sum of the rewards of its sub-steps.
        """

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(np.std, output_name="std")
    @define_epoch_stats(np.min, output_name="min")
    @define_epoch_stats(np.max, output_name="max")
    @define_episode_stats(latest)
    @define_step_stats(latest)
    @define_stats_grouping("name")
    def kpi(self, name: str, value: float) -> None:
        """A key performance indicator, calculated at the end of an episode.

        :param name: Name of the indicator.
        :param value: Its value for the whole episode.
        """

    @define_epoch_stats(sum)
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def test_event(self, value: Any) -> None:
        """Event without meaning, for tests of the event system.

        :param value: Any number.
        """
