"""Documented path of a wrapper that is defined in `return_normalization_reward_wrapper`."""

from maze.core.wrappers.return_normalization_reward_wrapper import RewardScalingWrapper

__all__ = ["RewardScalingWrapper"]
