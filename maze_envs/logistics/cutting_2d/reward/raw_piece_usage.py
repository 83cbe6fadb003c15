"""Count raw pieces and nothing else."""

from __future__ import annotations

from abc import ABC

from maze.core.annotations import override
from maze.core.env.maze_state import MazeStateType
from maze.core.env.reward import RewardAggregatorInterface
from maze_envs.logistics.cutting_2d.env.events import InventoryEvents


class RawPieceUsageRewardAggregator(RewardAggregatorInterface):
    """Penalise deliveries of raw pieces; impossible attempts cost nothing.

    :param reward_scale: What a delivery costs.
    """

    def __init__(self, reward_scale: float) -> None:
        super().__init__()
        self.reward_scale = reward_scale

    @override(RewardAggregatorInterface)
    def get_interfaces(self) -> list[type[ABC]]:
        return [InventoryEvents]

    @override(RewardAggregatorInterface)
    def summarize_reward(self, maze_state: MazeStateType | None = None) -> float:
        return -self.reward_scale * len(self.query_events(InventoryEvents.piece_replenished))
