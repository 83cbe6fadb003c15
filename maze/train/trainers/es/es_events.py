"""Statistics of evolution strategies."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_epoch_stats, define_stats_grouping


class ESEvents(ABC):
    """Statistics of each update."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("policy_id")
    def policy_grad_norm(self, policy_id: int, value: float) -> None:
        """Norm of the estimated gradient, without the penalty on the parameters."""

    @define_epoch_stats(np.mean)
    @define_stats_grouping("policy_id")
    def policy_norm(self, policy_id: int, value: float) -> None:
        """Norm of the parameters before the update."""

    @define_epoch_stats(np.mean)
    def real_time(self, value: float) -> None:
        """Duration of the update in seconds, including its rollouts."""

    @define_epoch_stats(np.mean)
    def update_ratio(self, value: float) -> None:
        """Norm of the step, relative to the norm of the parameters."""
