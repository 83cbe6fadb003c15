"""Heuristics of dispatching."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze_envs.common.array_policy import ArrayPolicy


class NearestOrder(ArrayPolicy):
    """Each idle vehicle takes the nearest order that is left, unless it is too far.

    :param farthest: Largest distance that vehicles drive to an order, as a share of the largest possible distance.
    """

    def __init__(self, farthest: float = 1.0) -> None:
        self.farthest = farthest

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: StepKeyType) -> dict[str, np.ndarray]:
        is_open, nearness = observation["orders"][..., 0], observation["orders"][..., 1]
        score = np.where((is_open > 0) & (nearness >= 1.0 - self.farthest - 1e-6), 1.0 + nearness, 0.0)
        waiting = np.full_like(score[..., :1], 0.5)
        return {"order": np.concatenate([score, waiting], axis=-1).argmax(axis=-1)}
