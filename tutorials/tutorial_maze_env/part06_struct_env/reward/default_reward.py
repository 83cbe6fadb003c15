"""Unchanged since part 05."""

from tutorial_maze_env.part05_reward.reward.default_reward import DefaultRewardAggregator

__all__ = ["DefaultRewardAggregator"]
