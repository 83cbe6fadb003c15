"""Heuristics of dispatching."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze_envs.common.array_policy import ArrayPolicy


class NearestOrder(ArrayPolicy):
    """Each idle vehicle takes the nearest order that is left."""

    @override(ArrayPolicy)
    def choose(self, observation: Mapping[str, np.ndarray], step_key: StepKeyType) -> dict[str, np.ndarray]:
        is_open, nearness = observation["orders"][..., 0], observation["orders"][..., 1]
        score = is_open * (1.0 + nearness)
        return {"order": np.concatenate([score, np.zeros_like(score[..., :1])], axis=-1).argmax(axis=-1)}
