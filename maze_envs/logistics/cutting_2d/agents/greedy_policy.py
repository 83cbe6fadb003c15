"""A heuristic for the cutting problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze_envs.logistics.cutting_2d.env.inventory import residuals
from maze_envs.logistics.cutting_2d.env.sizes import Size, fits

if TYPE_CHECKING:
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID


class GreedyPolicy(Policy):
    """Cuts each order from the smallest piece that it fits into, so that the largest remainder is as large as possible.

    Understands the observations of the flat environment and those of its two sub-steps.
    """

    @override(Policy)
    def needs_state(self) -> bool:
        return False

    @override(Policy)
    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None = None,
        env: BaseEnv | None = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        order = _size(observation["ordered_piece"])
        if "selected_piece" in observation:
            return _best_cut(_size(observation["selected_piece"]), order)
        pieces = observation["inventory"]
        index = _smallest_fitting(pieces, order)
        selection = {"piece_idx": np.int64(index)}
        return selection if _has_sub_steps(env) else {**selection, **_best_cut(_size(pieces[index]), order)}

    @override(Policy)
    def needs_env(self) -> bool:
        return True

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: ObservationType,
        num_candidates: int | None,
        maze_state: MazeStateType | None,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        """The one action that the heuristic knows."""
        return [self.compute_action(observation, maze_state, env, actor_id)], [1.0]


def _size(lengths: Any) -> Size:
    return int(lengths[0]), int(lengths[1])


def _has_sub_steps(env: Any) -> bool:
    return env is not None and len(env.action_spaces_dict) > 1


def _smallest_fitting(pieces: np.ndarray, order: Size) -> int:
    """Index of the smallest piece that the order fits into; the first one where there is none."""
    fitting = (pieces.min(axis=1) >= min(order)) & (pieces.max(axis=1) >= max(order))
    areas = np.where(fitting, pieces.prod(axis=1), np.inf)
    return int(areas.argmin())


def _best_cut(piece: Size, order: Size) -> dict[str, np.int64]:
    best = (-1, 0, 0)
    for rotation in (0, 1):
        turned = order[::-1] if rotation else order
        if fits(turned, piece):
            for cutting_order in (0, 1):
                largest = max((w * h for w, h in residuals(piece, turned, bool(cutting_order))), default=0)
                best = max(best, (largest, -rotation, -cutting_order))
    return {"cut_rotation": np.int64(-best[1]), "cut_order": np.int64(-best[2])}
