"""Action of the cutting environment: the cut of a piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cutting2DMazeAction:
    """A cut."""

    piece_id: int
    """Index of the piece in the inventory."""
    rotate: bool
    """Whether the order is turned by 90 degrees."""
    reverse_cutting_order: bool
    """Whether the cut that goes through the whole piece is along the first axis instead of the second."""
