"""Statistics of IMPALA beyond those of all actor-critics."""

from __future__ import annotations

from abc import ABC
from functools import partial

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_time

define_part = partial(define_time, prefix="")


class ImpalaEvents(ABC):
    """Times of the parts of an update, in seconds and in percent of the update; queue sizes; policy lag."""

    @define_part
    def time_dequeuing_actors(self, time: float, percent: float) -> None:
        """Time spent waiting for rollouts; large if the actors are slower than the learner."""

    @define_part
    def time_collecting_actors(self, time: float, percent: float) -> None:
        """Time for a batch: waiting for, receiving and joining rollouts."""

    @define_part
    def time_learner_rollout(self, time: float, percent: float) -> None:
        """Time for evaluating policy and critic on the batch, including V-trace."""

    @define_part
    def time_loss_computation(self, time: float, percent: float) -> None:
        """Time for computing the loss."""

    @define_part
    def time_backprob(self, time: float, percent: float) -> None:
        """Time for back-propagation, the optimizer step and publishing the new policy."""

    @define_epoch_stats(np.mean, input_name="before", output_name="before")
    @define_epoch_stats(np.mean, input_name="after", output_name="after")
    def estimated_queue_sizes(self, before: int, after: int) -> None:
        """Number of finished rollouts in the queue, before and after the learner takes a batch."""

    @define_epoch_stats(np.mean, output_name="mean")
    @define_epoch_stats(max, output_name="max")
    def policy_lag(self, value: float) -> None:
        """Number of policy updates that the rollouts of a batch have missed."""
