"""A heuristic for CartPole."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID


class DummyCartPolePolicy(Policy):
    """Balance the pole by pushing towards the side to which it is about to fall, and drift back to the centre."""

    # Of cart position, cart velocity, pole angle, pole angular velocity.
    _gains = np.array([0.05, 0.25, 2.0, 1.0])

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> Any:
        falls_to_the_right = float(self._gains @ observation["observation"]) > 0.0
        return {"action": np.int64(falls_to_the_right)}
