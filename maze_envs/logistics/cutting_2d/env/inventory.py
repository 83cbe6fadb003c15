"""The inventory of pieces, and the mechanics of cutting."""

from __future__ import annotations

from maze.core.errors import ConfigError
from maze_envs.logistics.cutting_2d.env.events import InventoryEvents
from maze_envs.logistics.cutting_2d.env.maze_action import Cutting2DMazeAction
from maze_envs.logistics.cutting_2d.env.maze_state import Size, fits


class Inventory:
    """Pieces on stock, the oldest first.

    :param max_pieces_in_inventory: Capacity. When it is exceeded the oldest pieces are thrown away; raw pieces only
        when there is nothing else.
    :param raw_piece_size: Size of a raw piece.
    :param inventory_events: Topic to report to.
    """

    def __init__(self, max_pieces_in_inventory: int, raw_piece_size: Size, inventory_events: InventoryEvents) -> None:
        if max_pieces_in_inventory < 1:
            raise ConfigError(f"core_env.max_pieces_in_inventory: must be at least 1, found {max_pieces_in_inventory}.")
        self.max_pieces_in_inventory = max_pieces_in_inventory
        self.raw_piece_size = raw_piece_size
        self.inventory_events = inventory_events
        self.pieces: list[Size] = []

    def size(self) -> int:
        """Return the number of pieces."""
        return len(self.pieces)

    def store_piece(self, piece: Size) -> None:
        """Add a piece."""
        if len(self.pieces) >= self.max_pieces_in_inventory:
            oldest = next((index for index, other in enumerate(self.pieces) if other != self.raw_piece_size), 0)
            self.inventory_events.piece_discarded(piece=self.pieces.pop(oldest))
        self.pieces.append(piece)

    def replenish_piece(self) -> None:
        """Have a raw piece delivered."""
        self.store_piece(self.raw_piece_size)
        self.inventory_events.piece_replenished()

    def cut(self, maze_action: Cutting2DMazeAction, order: Size) -> bool:
        """Cut an order from a piece and store what is left.

        :param maze_action: Which piece, and how.
        :param order: Size to cut.
        :return: Whether there is such a piece, and it is large enough. If not, nothing happens.
        """
        if not 0 <= maze_action.piece_id < len(self.pieces):
            return False
        piece = self.pieces[maze_action.piece_id]
        width, height = order[::-1] if maze_action.rotate else order
        if not fits((width, height), piece):
            return False
        del self.pieces[maze_action.piece_id]
        for residual in residuals(piece, (width, height), maze_action.reverse_cutting_order):
            self.store_piece(residual)
        return True

    def log_step_statistics(self) -> None:
        """Report the number of pieces; called once per step."""
        self.inventory_events.pieces_in_inventory(value=len(self.pieces))


def residuals(piece: Size, order: Size, reverse_cutting_order: bool) -> list[Size]:
    """Return what two guillotine cuts leave: one through the whole piece, one through the strip that was cut off.

    :param piece: The piece.
    :param order: What is cut from it; it fits.
    :param reverse_cutting_order: Whether the first cut fixes the extent in the second direction.
    """
    if reverse_cutting_order:
        pieces = [(piece[0], piece[1] - order[1]), (piece[0] - order[0], order[1])]
    else:
        pieces = [(piece[0] - order[0], piece[1]), (order[0], piece[1] - order[1])]
    return [piece for piece in pieces if min(piece) > 0]
