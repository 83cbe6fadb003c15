"""A heuristic for the discrete LunarLander."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID

_NOTHING, _LEFT_ENGINE, _MAIN_ENGINE, _RIGHT_ENGINE = range(4)


class HeuristicLunarLanderPolicy(Policy):
    """Two proportional-derivative controllers: one leans towards the landing pad, one brakes the descent."""

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> Any:
        x, y, velocity_x, velocity_y, angle, spin, left_leg, right_leg = map(float, observation["observation"])
        if left_leg and right_leg:
            action = _MAIN_ENGINE if velocity_y < -0.2 else _NOTHING
            return {"action": np.int64(action)}

        # leaning to the left (positive angle) pushes to the left
        target_angle = min(max(0.5 * x + velocity_x, -0.35), 0.35)
        turn = 0.6 * (target_angle - angle) - 0.8 * spin

        allowed_sink_rate = 0.12 + 0.35 * max(y, 0.0)
        allowed_sink_rate -= 0.25 * abs(x)
        brake = -velocity_y - allowed_sink_rate
        if left_leg or right_leg:
            turn = 0.0

        if brake > 0.05 and brake > abs(turn):
            action = _MAIN_ENGINE
        elif turn > 0.05:
            action = _LEFT_ENGINE
        elif turn < -0.05:
            action = _RIGHT_ENGINE
        else:
            action = _NOTHING
        return {"action": np.int64(action)}
