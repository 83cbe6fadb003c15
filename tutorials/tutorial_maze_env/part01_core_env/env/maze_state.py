"""States."""

from __future__ import annotations


class Cutting2DMazeState:
    """Snapshot of the simulation.

    :param inventory: Sizes of the pieces on stock; copied.
    :param max_pieces_in_inventory: Capacity of the stock.
    :param current_demand: Size of the piece that is ordered now.
    :param raw_piece_size: Size of a raw piece.
    """

    def __init__(
        self,
        inventory: list[tuple[int, int]],
        max_pieces_in_inventory: int,
        current_demand: tuple[int, int],
        raw_piece_size: tuple[int, int],
    ) -> None:
        self.inventory = inventory.copy()
        self.max_pieces_in_inventory = max_pieces_in_inventory
        self.current_demand = current_demand
        self.raw_piece_size = raw_piece_size
