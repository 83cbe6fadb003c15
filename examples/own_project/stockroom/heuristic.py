"""Heuristic to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.env.structured_env import ActorID

from .simulation import CHOOSE_PRODUCT


class MostUrgentFirst(Policy):
    """Order the product that runs out first, as much of it as fits."""

    def compute_action(
        self,
        observation: dict[str, Any],
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        if actor_id is not None and actor_id.step_key == CHOOSE_PRODUCT:
            return {"product": int(np.argmin(observation["weeks_left"]))}
        return {"lots": int(np.flatnonzero(observation["lots_mask"])[-1])}
