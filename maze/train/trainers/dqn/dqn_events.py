"""Statistics of DQN."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping

Key = int | str


class DQNEvents(ABC):
    """What DQN reports, once per epoch as the mean over its updates. Percentages are of collecting and drawing."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def value_loss(self, step_key: Key, value: float) -> None:
        """Loss of the values of a sub-step's actions."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def action_value(self, step_key: Key, value: float) -> None:
        """Mean value of the actions that were taken in a sub-step."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("step_key")
    def grad_norm(self, step_key: Key, value: float) -> None:
        """Gradient norm of the networks of a sub-step, before clipping."""

    @define_epoch_stats(np.mean)
    def epsilon(self, value: float) -> None:
        """Share of actions drawn at random."""

    @define_epoch_stats(np.mean, input_name="time", output_name="mean_time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="mean_percent")
    def time_learner_rollout(self, time: float, percent: float) -> None:
        """Seconds spent on collecting transitions."""

    @define_epoch_stats(np.mean, input_name="time", output_name="mean_time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="mean_percent")
    def time_sampling_from_buffer(self, time: float, percent: float) -> None:
        """Seconds spent on drawing batches from the replay buffer."""

    @define_epoch_stats(np.mean)
    def buffer_size(self, value: int) -> None:
        """Number of transitions in the replay buffer."""
