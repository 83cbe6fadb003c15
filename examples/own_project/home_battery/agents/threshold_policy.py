"""A policy that an engineer would write down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.base_env import BaseEnv
from maze.core.env.structured_env import ActorID

DISCHARGE, WAIT, CHARGE = 0, 1, 2


class ThresholdPolicy(Policy):
    """Stores what the roof gives beyond the demand, and spends it when energy is dear.

    :param dear: Price in EUR per kWh from which on the battery is discharged.
    :param full: Part of the capacity from which on it is not charged.
    :param empty: Part of the capacity down to which it is discharged.
    """

    def __init__(self, dear: float, full: float, empty: float) -> None:
        self.dear = dear
        self.full = full
        self.empty = empty

    @override(Policy)
    def needs_state(self) -> bool:
        return False

    @override(Policy)
    def compute_action(
        self,
        observation: dict[str, np.ndarray],
        maze_state: Any = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        (charge,), (price, solar, demand) = observation["charge"], observation["market"]
        if solar > demand and charge < self.full:
            return {"battery": CHARGE}
        if price >= self.dear and charge > self.empty:
            return {"battery": DISCHARGE}
        return {"battery": WAIT}

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: dict[str, np.ndarray],
        num_candidates: int | None,
        maze_state: Any,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[dict[str, Any]], Sequence[float]]:
        return [self.compute_action(observation)], [1.0]
