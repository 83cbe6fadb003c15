"""Reward scaling."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.utils.config_utils import number
from maze.core.wrappers.wrapper import RewardWrapper


class RewardScalingWrapper(RewardWrapper[MazeEnv[Any]]):
    """Multiply each reward by a constant.

    :param env: The environment to wrap.
    :param scale: The factor.
    :raises ConfigError: It is not a finite number.
    """

    CLONED = (*RewardWrapper.CLONED, "scale")

    def __init__(self, env: MazeEnv[Any], scale: float) -> None:
        super().__init__(env)
        self.scale = number("RewardScalingWrapper.scale", scale)

    @override(RewardWrapper)
    def reward(self, reward: float) -> float:
        return reward * self.scale

    @override(RewardWrapper)
    def get_actor_rewards(self) -> np.ndarray | None:
        rewards = self.env.get_actor_rewards()
        return None if rewards is None else np.asarray(rewards) * self.scale
