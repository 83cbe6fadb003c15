"""Events of the robot."""

from __future__ import annotations

from abc import ABC

import numpy as np

from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats


class PickAndPlaceEvents(ABC):
    """Objects and what happens to them."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def object_grasped(self) -> None:
        """The gripper holds the object."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def object_placed(self) -> None:
        """The object is where it belongs, the right way round."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(len)
    def grip_failed(self) -> None:
        """The gripper was turned the wrong way, or there was nothing to grasp or to place."""
