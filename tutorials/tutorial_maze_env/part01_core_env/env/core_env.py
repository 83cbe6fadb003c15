"""Mechanics of the cutting problem."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv

from .inventory import Inventory
from .maze_action import Cutting2DMazeAction
from .maze_state import Cutting2DMazeState


class Cutting2DCoreEnvironment(CoreEnv):
    """Fulfils one customer order per step by cutting a piece on stock.

    There is always a raw piece on stock: when it is cut, another one is delivered. The reward is -1 for each delivery
    and -2 for a cut that is not possible.

    :param max_pieces_in_inventory: Capacity of the stock. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    :param static_demand: Size of the piece that is ordered in every step.
    """

    def __init__(
        self, max_pieces_in_inventory: int, raw_piece_size: tuple[int, int], static_demand: tuple[int, int]
    ) -> None:
        super().__init__()
        self.max_pieces_in_inventory = max_pieces_in_inventory
        # Configurations hold lists, which never equal the tuples on stock.
        self.raw_piece_size = (raw_piece_size[0], raw_piece_size[1])
        self.current_demand = (static_demand[0], static_demand[1])
        self._setup_env()

    def _setup_env(self) -> None:
        self.inventory = Inventory(self.max_pieces_in_inventory, self.raw_piece_size)
        self.inventory.replenish_piece()

    @override(CoreEnv)
    def step(self, maze_action: Cutting2DMazeAction) -> tuple[Cutting2DMazeState, float, bool, dict[Any, Any]]:
        info: dict[Any, Any] = {}
        reward = 0
        if maze_action.piece_id >= self.inventory.size():
            info["error"] = "piece_id_out_of_bounds"
        else:
            piece_to_cut = self.inventory.pieces[maze_action.piece_id]
            if self.inventory.cut(maze_action, self.current_demand):
                info["msg"] = "valid_cut"
                if piece_to_cut == self.raw_piece_size:
                    self.inventory.replenish_piece()
                    reward = -1
            else:
                info["error"] = "invalid_cut"
                reward = -2
        return self.get_maze_state(), reward, False, info

    @override(CoreEnv)
    def get_maze_state(self) -> Cutting2DMazeState:
        return Cutting2DMazeState(
            self.inventory.pieces, self.max_pieces_in_inventory, self.current_demand, self.raw_piece_size
        )

    @override(CoreEnv)
    def reset(self) -> Cutting2DMazeState:
        self._setup_env()
        return self.get_maze_state()

    @override(CoreEnv)
    def close(self) -> None:
        """Nothing to release."""

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        """Do nothing: nothing is random here."""

    # What follows becomes meaningful in later parts.

    @override(CoreEnv)
    def get_renderer(self) -> Any:
        return None

    @override(CoreEnv)
    def get_serializable_components(self) -> dict[str, Any]:
        return {}

    @override(CoreEnv)
    def is_actor_done(self) -> Any:
        return None

    @override(CoreEnv)
    def actor_id(self) -> Any:
        return None

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> Any:
        return None
