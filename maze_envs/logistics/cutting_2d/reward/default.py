"""Penalise what should not happen."""

from __future__ import annotations

from abc import ABC

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.env.reward import RewardAggregatorInterface
from maze_envs.logistics.cutting_2d.env.events import CuttingEvents, InventoryEvents


class DefaultRewardAggregator(RewardAggregatorInterface):
    """Penalise deliveries of raw pieces and attempts that are not possible.

    :param invalid_action_penalty: Reward (usually negative) for selecting nothing or a piece that is too small.
    :param raw_piece_usage_penalty: Reward (usually negative) for the delivery of a raw piece.
    """

    def __init__(self, invalid_action_penalty: float = -2.0, raw_piece_usage_penalty: float = -1.0) -> None:
        super().__init__()
        self.invalid_action_penalty = invalid_action_penalty
        self.raw_piece_usage_penalty = raw_piece_usage_penalty

    @override(RewardAggregatorInterface)
    def get_interfaces(self) -> list[type[ABC]]:
        return [CuttingEvents, InventoryEvents]

    @override(RewardAggregatorInterface)
    def summarize_reward(self, maze_state: MazeStateType | None = None) -> float:
        n_deliveries = len(self.query_events(InventoryEvents.piece_replenished))
        n_invalid = len(self.query_events([CuttingEvents.invalid_piece_selected, CuttingEvents.invalid_cut]))
        return n_deliveries * self.raw_piece_usage_penalty + n_invalid * self.invalid_action_penalty
