"""Independent orders."""

from __future__ import annotations

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze_envs.logistics.cutting_2d.demand_generator import DemandGenerator
from maze_envs.logistics.cutting_2d.env.maze_state import Size, as_size, fits


class UniformDemandGenerator(DemandGenerator):
    """Draw both extents of each order uniformly, independently of all others.

    :param raw_piece_size: Size of a raw piece.
    :param min_size: Smallest order.
    :param max_size: Largest order; None: a raw piece.
    """

    def __init__(self, raw_piece_size: Size, min_size: Size = (1, 1), max_size: Size | None = None) -> None:
        super().__init__()
        where = "core_env.demand_generator"
        self.min_size = as_size(min_size, f"{where}.min_size")
        self.max_size = raw_piece_size if max_size is None else as_size(max_size, f"{where}.max_size")
        if not fits(self.min_size, self.max_size) or not fits(self.max_size, raw_piece_size):
            raise ConfigError(
                f"{where}: expected min_size <= max_size <= raw_piece_size in both directions, "
                f"found {self.min_size}, {self.max_size} and {raw_piece_size}."
            )

    @override(DemandGenerator)
    def reset(self) -> None:
        """Do nothing: orders do not depend on those before."""

    @override(DemandGenerator)
    def next_order(self) -> Size:
        width, height = self.rng.integers(self.min_size, self.max_size, endpoint=True)
        return int(width), int(height)
