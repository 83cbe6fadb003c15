"""The stock of pieces, and the mechanics of cutting."""

from __future__ import annotations

from .maze_action import Cutting2DMazeAction

Size = tuple[int, int]


class Inventory:
    """Stock of pieces, oldest first.

    :param max_pieces_in_inventory: Capacity. When it is exceeded the oldest pieces are thrown away.
    :param raw_piece_size: Size of a raw piece.
    """

    def __init__(self, max_pieces_in_inventory: int, raw_piece_size: Size) -> None:
        if max_pieces_in_inventory < 1:
            raise ValueError(f"`max_pieces_in_inventory` must be at least 1, found {max_pieces_in_inventory}.")
        self.max_pieces_in_inventory = max_pieces_in_inventory
        self.raw_piece_size = raw_piece_size
        self.pieces: list[Size] = []

    def is_full(self) -> bool:
        """Whether another piece would push out the oldest one."""
        return len(self.pieces) >= self.max_pieces_in_inventory

    def size(self) -> int:
        """Number of pieces on stock."""
        return len(self.pieces)

    def store_piece(self, piece: Size) -> None:
        """Add a piece."""
        if self.is_full():
            self.discard_piece()
        self.pieces.append(piece)

    def discard_piece(self) -> Size:
        """Throw the oldest piece away; raw pieces only if there are no others."""
        oldest = next((index for index, piece in enumerate(self.pieces) if piece != self.raw_piece_size), 0)
        return self.pieces.pop(oldest)

    def replenish_piece(self) -> None:
        """Add a raw piece."""
        self.store_piece(self.raw_piece_size)

    def cut(self, maze_action: Cutting2DMazeAction, ordered_piece: Size) -> bool:
        """Cut a piece to size and return the rest to the stock.

        :param maze_action: The piece and the cut.
        :param ordered_piece: The size to cut.
        :return: Whether the piece exists and is large enough; otherwise the stock is unchanged.
        """
        wanted = ordered_piece[::-1] if maze_action.rotate else ordered_piece
        if not 0 <= maze_action.piece_id < self.size():
            return False
        piece = self.pieces[maze_action.piece_id]
        if wanted[0] > piece[0] or wanted[1] > piece[1]:
            return False
        del self.pieces[maze_action.piece_id]

        # A guillotine cut goes through the whole piece; the second one only through the strip that holds the order.
        remaining = list(piece)
        for dim in (1, 0) if maze_action.reverse_cutting_order else (0, 1):
            residual = remaining.copy()
            residual[dim] -= wanted[dim]
            remaining[dim] = wanted[dim]
            if residual[dim] > 0:
                self.store_piece((residual[0], residual[1]))
        return True
