"""A policy for the dummy environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override

if TYPE_CHECKING:
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID


class DummyGreedyPolicy(Policy):
    """Names the number that is shown, always."""

    @override(Policy)
    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        return {"number": np.argmax(observation["target"])}

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: ObservationType,
        num_candidates: int | None,
        maze_state: MazeStateType | None,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        best = np.argsort(-observation["target"], kind="stable")[:num_candidates]
        return [{"number": number} for number in best], [float(observation["target"][number]) for number in best]
