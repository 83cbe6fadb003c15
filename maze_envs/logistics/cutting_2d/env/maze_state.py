"""State of the cutting environment: pieces in stock, the ordered piece, and their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from maze.core.errors import ConfigError

Size = tuple[int, int]
"""Extent of a piece in both directions, in whole units of length."""


@dataclass(frozen=True)
class Cutting2DMazeState:
    """Snapshot of the simulation."""

    inventory: tuple[Size, ...]
    """Pieces on stock, the oldest first."""
    max_pieces_in_inventory: int
    current_demand: Size
    """The order to be fulfilled in the coming step."""
    raw_piece_size: Size


def as_size(value: Sequence[Any], where: str) -> Size:
    """Check a size from a configuration.

    :param value: Two positive whole numbers.
    :param where: Configuration key, for messages.
    """
    is_pair = not isinstance(value, str) and len(value) == 2
    if not is_pair or any(int(length) != length or length < 1 for length in value):
        raise ConfigError(f"{where}: expected two positive whole numbers, such as [100, 100], found {value!r}.")
    return int(value[0]), int(value[1])


def fits(order: Size, piece: Size) -> bool:
    """Return whether the order fits into the piece as it is, without being turned."""
    return order[0] <= piece[0] and order[1] <= piece[1]
