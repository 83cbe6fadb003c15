"""From the agent's actions to cuts."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze_envs.logistics.cutting_2d.env.maze_action import Cutting2DMazeAction
from maze_envs.logistics.cutting_2d.env.maze_state import Cutting2DMazeState


class ActionConversion(ActionConversionInterface):
    """The agent chooses a slot of the inventory, whether to turn the order, and the order of the cuts.

    :param max_pieces_in_inventory: Capacity of the inventory.
    """

    uses_state = False

    def __init__(self, max_pieces_in_inventory: int) -> None:
        self.max_pieces_in_inventory = max_pieces_in_inventory

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, Any], maze_state: Cutting2DMazeState) -> Cutting2DMazeAction:
        return Cutting2DMazeAction(
            piece_id=int(action["piece_idx"]),
            rotate=bool(action["cut_rotation"]),
            reverse_cutting_order=bool(action["cut_order"]),
        )

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: Cutting2DMazeAction) -> dict[str, Any]:
        return {
            "piece_idx": maze_action.piece_id,
            "cut_rotation": int(maze_action.rotate),
            "cut_order": int(maze_action.reverse_cutting_order),
        }

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return spaces.Dict(
            {
                "piece_idx": spaces.Discrete(self.max_pieces_in_inventory),
                "cut_rotation": spaces.Discrete(2),
                "cut_order": spaces.Discrete(2),
            }
        )
