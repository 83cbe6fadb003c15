"""Reward clipping."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigValueError
from maze.core.utils.config_utils import number
from maze.core.wrappers.wrapper import RewardWrapper


class RewardClippingWrapper(RewardWrapper[MazeEnv[Any]]):
    """Clip each reward to a range.

    :param env: The environment to wrap.
    :param min_val: Smallest reward passed on.
    :param max_val: Largest reward passed on.
    :raises ConfigError: The range is empty, or not of numbers.
    """

    CLONED = (*RewardWrapper.CLONED, "min_val", "max_val")

    def __init__(self, env: MazeEnv[Any], min_val: float, max_val: float) -> None:
        self.min_val = number("RewardClippingWrapper.min_val", min_val, infinite=True)
        self.max_val = number("RewardClippingWrapper.max_val", max_val, infinite=True)
        if min_val > max_val:
            raise ConfigValueError(
                f"RewardClippingWrapper: `min_val` ({min_val}) is larger than `max_val` ({max_val})."
            )
        super().__init__(env)

    @override(RewardWrapper)
    def reward(self, reward: float) -> float:
        # In this order of comparisons NaN passes, to be reported, and does not become a bound.
        if reward < self.min_val:
            return self.min_val
        return self.max_val if reward > self.max_val else reward
