"""What is on stock and what is ordered."""

from __future__ import annotations

from dataclasses import dataclass

from maze_envs.logistics.cutting_2d.env.sizes import Size


@dataclass(frozen=True)
class Cutting2DMazeState:
    """Snapshot of the simulation."""

    inventory: tuple[Size, ...]
    """Pieces on stock, the oldest first."""
    max_pieces_in_inventory: int
    current_demand: Size
    """The order to be fulfilled in the coming step."""
    raw_piece_size: Size
