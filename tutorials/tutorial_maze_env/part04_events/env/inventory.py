"""The stock, with events."""

from __future__ import annotations

from maze.core.annotations import override
from tutorial_maze_env.part01_core_env.env.inventory import Inventory as Part01Inventory
from tutorial_maze_env.part01_core_env.env.inventory import Size

from .events import InventoryEvents


class Inventory(Part01Inventory):
    """The stock of part 01 that reports its changes.

    :param max_pieces_in_inventory: Capacity. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    :param inventory_events: Topic to report to.
    """

    def __init__(self, max_pieces_in_inventory: int, raw_piece_size: Size, inventory_events: InventoryEvents) -> None:
        super().__init__(max_pieces_in_inventory, raw_piece_size)
        self.inventory_events = inventory_events

    @override(Part01Inventory)
    def discard_piece(self) -> Size:
        piece = super().discard_piece()
        self.inventory_events.piece_discarded(piece=piece)
        return piece

    @override(Part01Inventory)
    def replenish_piece(self) -> None:
        super().replenish_piece()
        self.inventory_events.piece_replenished()

    def log_step_statistics(self) -> None:
        """Report the number of pieces; called once per step."""
        self.inventory_events.pieces_in_inventory(self.size())
