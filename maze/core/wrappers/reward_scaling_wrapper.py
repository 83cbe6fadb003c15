"""Documented path of a wrapper that is defined in `reward_wrappers`."""

from maze.core.wrappers.reward_wrappers import RewardScalingWrapper

__all__ = ["RewardScalingWrapper"]
