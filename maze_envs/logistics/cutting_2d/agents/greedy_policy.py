"""A heuristic for the cutting problem."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze_envs.logistics.cutting_2d.env.inventory import residuals
from maze_envs.logistics.cutting_2d.env.maze_state import Size, fits

if TYPE_CHECKING:
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID


class GreedyPolicy(Policy):
    """Cut each order from the smallest piece that it fits into, so that the largest remainder is as large as possible.

    Ranks the other pieces and cuts likewise, for policies that plan. Understands the observations of the flat
    environment and those of its two sub-steps.
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
        return next(self._ranked(observation, env))

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
        """Rank pieces by their size, and the cuts of a piece by the largest remainder."""
        actions = list(itertools.islice(self._ranked(observation, env), num_candidates))
        return actions, [1.0, *[0.0] * (len(actions) - 1)]

    def _ranked(self, observation: ObservationType, env: Any) -> Iterator[ActionType]:
        order = _size(observation["ordered_piece"])
        if "selected_piece" in observation:
            yield from _cuts(_size(observation["selected_piece"]), order)
            return
        pieces = observation["inventory"]
        for index in _fitting(pieces, order):
            selection = {"piece_idx": np.int64(index)}
            if env is not None and len(env.action_spaces_dict) > 1:
                yield selection
            else:
                yield from ({**selection, **cut} for cut in _cuts(_size(pieces[index]), order))


def _size(lengths: Any) -> Size:
    return int(lengths[0]), int(lengths[1])


def _fitting(pieces: np.ndarray, order: Size) -> list[int]:
    """Return indices of the pieces that the order fits into, smallest first, one of each size; the first piece if there
    are none."""
    width, height = pieces[:, 0], pieces[:, 1]  # columns: reductions along two elements are slow
    shorter, longer = np.minimum(width, height), np.maximum(width, height)
    fitting = np.flatnonzero((shorter >= min(order)) & (longer >= max(order)))
    if not len(fitting):
        return [0]
    indices = fitting[np.argsort((shorter * longer)[fitting], kind="stable")]
    sizes = zip(shorter[indices].tolist(), longer[indices].tolist(), strict=True)
    ranked = list(zip(sizes, indices.tolist(), strict=True))
    return list(dict(reversed(ranked)).values())[::-1]


def _cuts(piece: Size, order: Size) -> list[dict[str, np.int64]]:
    """Return the possible cuts, that of the largest remainder first."""
    ranked = [
        (max((w * h for w, h in residuals(piece, turned, bool(cutting_order))), default=0), -rotation, -cutting_order)
        for rotation, turned in enumerate((order, order[::-1]))
        if fits(turned, piece)
        for cutting_order in (0, 1)
    ]
    return [
        {"cut_rotation": np.int64(-rotation), "cut_order": np.int64(-cutting_order)}
        for _, rotation, cutting_order in sorted(ranked, reverse=True) or [(0, 0, 0)]
    ]
