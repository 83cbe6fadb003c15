"""Statistics of IMPALA beyond those of all actor-critics."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats


class ImpalaEvents(ABC):
    """Where the time of the learner goes; times in seconds and in percent of the update."""

    @define_epoch_stats(np.mean, input_name="time", output_name="time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="percent")
    def time_dequeuing_actors(self, time: float, percent: float) -> None:
        """Waiting for rollouts: large where the actors are slower than the learner."""

    @define_epoch_stats(np.mean, input_name="time", output_name="time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="percent")
    def time_collecting_actors(self, time: float, percent: float) -> None:
        """Getting a batch in all: waiting, receiving and joining rollouts."""

    @define_epoch_stats(np.mean, input_name="time", output_name="time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="percent")
    def time_learner_rollout(self, time: float, percent: float) -> None:
        """Asking policy and critic about the batch, V-trace included."""

    @define_epoch_stats(np.mean, input_name="time", output_name="time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="percent")
    def time_loss_computation(self, time: float, percent: float) -> None:
        """Computing the loss."""

    @define_epoch_stats(np.mean, input_name="time", output_name="time")
    @define_epoch_stats(np.mean, input_name="percent", output_name="percent")
    def time_backprob(self, time: float, percent: float) -> None:
        """Back-propagation, the step of the optimizer and handing out the new policy."""

    @define_epoch_stats(np.mean, input_name="before", output_name="before")
    @define_epoch_stats(np.mean, input_name="after", output_name="after")
    def estimated_queue_sizes(self, before: int, after: int) -> None:
        """Finished rollouts that wait for the learner, before and after it takes a batch."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    def policy_lag(self, value: float) -> None:
        """How many updates of the policy the rollouts of a batch have missed."""
