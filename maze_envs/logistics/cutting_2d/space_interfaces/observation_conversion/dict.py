"""From states to the agent's observations."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze_envs.logistics.cutting_2d.env.maze_state import Cutting2DMazeState


class ObservationConversion(ObservationConversionInterface):
    """The agent sees all pieces on stock (empty slots are zero), how many there are, and the order.

    :param raw_piece_size: Size of a raw piece.
    :param max_pieces_in_inventory: Capacity of the inventory.
    """

    def __init__(self, raw_piece_size: tuple[int, int], max_pieces_in_inventory: int) -> None:
        self.raw_piece_size = raw_piece_size
        self.max_pieces_in_inventory = max_pieces_in_inventory

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: Cutting2DMazeState) -> dict[str, np.ndarray]:
        n_pieces = len(maze_state.inventory)
        inventory = np.zeros((self.max_pieces_in_inventory, 2), dtype=np.float32)
        if n_pieces:
            inventory[:n_pieces] = maze_state.inventory
        return {
            "inventory": inventory,
            "inventory_size": np.array([n_pieces], dtype=np.float32),
            "ordered_piece": np.array(maze_state.current_demand, dtype=np.float32),
        }

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        n_slots = self.max_pieces_in_inventory
        largest = np.asarray(self.raw_piece_size, dtype=np.float32) + 1
        return spaces.Dict(
            {
                "inventory": spaces.Box(0, np.tile(largest, (n_slots, 1)), dtype=np.float32),
                "inventory_size": spaces.Box(0, n_slots + 1, shape=(1,), dtype=np.float32),
                "ordered_piece": spaces.Box(0, largest.max(), shape=(2,), dtype=np.float32),
            }
        )
