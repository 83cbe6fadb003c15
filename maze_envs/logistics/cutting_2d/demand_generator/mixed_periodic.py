"""Orders of which a known number of raw pieces is enough."""

from __future__ import annotations

import copy

import numpy as np
from typing_extensions import Self

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze_envs.logistics.cutting_2d.demand_generator import DemandGenerator
from maze_envs.logistics.cutting_2d.env.maze_state import Size


class MixedPeriodicDemandGenerator(DemandGenerator):
    """Repeat a set of orders that exactly fills a number of raw pieces, mixed anew in each period.

    At the beginning of an episode `n_raw_pieces` raw pieces are divided at random by guillotine cuts into
    `m_demanded_pieces` pieces. These are ordered in every period of as many steps, each time in another sequence. No
    policy can do with fewer than `n_raw_pieces` raw pieces per period. A new future draws the rest of the period in
    another sequence; which pieces a period consists of is part of the state.

    :param raw_piece_size: Size of a raw piece.
    :param n_raw_pieces: Raw pieces that one period's orders fill.
    :param m_demanded_pieces: Orders of one period.
    :param rotate: Whether each order is turned by 90 degrees with a probability of one half.
    """

    def __init__(
        self, raw_piece_size: Size, n_raw_pieces: int = 3, m_demanded_pieces: int = 10, rotate: bool = True
    ) -> None:
        super().__init__()
        if n_raw_pieces < 1:
            raise ConfigError(f"core_env.demand_generator.n_raw_pieces: must be at least 1, found {n_raw_pieces}.")
        if not n_raw_pieces <= m_demanded_pieces <= n_raw_pieces * raw_piece_size[0] * raw_piece_size[1]:
            raise ConfigError(
                f"core_env.demand_generator.m_demanded_pieces: {n_raw_pieces} raw pieces of size {raw_piece_size} "
                f"cannot be divided into {m_demanded_pieces} pieces."
            )
        self.raw_piece_size = raw_piece_size
        self.n_raw_pieces = n_raw_pieces
        self.m_demanded_pieces = m_demanded_pieces
        self.rotate = rotate
        self.pattern: list[Size] = []
        self.pending: list[Size] = []
        """The rest of the period, in reverse."""

    @override(DemandGenerator)
    def reset(self) -> None:
        pieces = [self.raw_piece_size] * self.n_raw_pieces
        while len(pieces) < self.m_demanded_pieces:
            pieces += self._divided(pieces.pop(self._index_to_divide(pieces)))
        self.pattern = pieces
        self.pending = []

    @override(DemandGenerator)
    def copy(self) -> Self:
        twin = copy.copy(self)
        twin.rng, twin.pending = copy.deepcopy(self.rng), self.pending.copy()
        return twin

    @override(DemandGenerator)
    def new_future(self, seed: int) -> None:
        super().new_future(seed)
        self.pending = [self.pending[index] for index in self.rng.permutation(len(self.pending))]

    @override(DemandGenerator)
    def next_order(self) -> Size:
        if not self.pending:
            self.pending = [self.pattern[index] for index in self.rng.permutation(len(self.pattern))]
        order = self.pending.pop()
        return order[::-1] if self.rotate and self.rng.random() < 0.5 else order

    def _index_to_divide(self, pieces: list[Size]) -> int:
        # In proportion to the area, so that sizes do not drift apart; pieces of a single unit cannot be divided.
        areas = np.array([width * height if width * height > 1 else 0 for width, height in pieces], dtype=np.float64)
        return int(self.rng.choice(len(pieces), p=areas / areas.sum()))

    def _divided(self, piece: Size) -> list[Size]:
        dim = int(self.rng.random() < piece[1] / sum(piece))  # rather across the longer side
        if piece[dim] == 1:
            dim = 1 - dim
        cut = int(self.rng.integers(1, piece[dim]))
        if dim == 0:
            return [(cut, piece[1]), (piece[0] - cut, piece[1])]
        return [(piece[0], cut), (piece[0], piece[1] - cut)]
