"""Actions."""

from __future__ import annotations


class Cutting2DMazeAction:
    """A cut.

    :param piece_id: Index of the piece in the inventory.
    :param rotate: Whether the ordered piece is turned by 90 degrees.
    :param reverse_cutting_order: Whether the first cut is along the other axis.
    """

    def __init__(self, piece_id: int, rotate: bool, reverse_cutting_order: bool) -> None:
        self.piece_id = piece_id
        self.rotate = rotate
        self.reverse_cutting_order = reverse_cutting_order
