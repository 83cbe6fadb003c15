"""A fixed sequence of orders."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze_envs.logistics.cutting_2d.demand_generator import DemandGenerator
from maze_envs.logistics.cutting_2d.env.maze_state import Size, as_size, fits


class StaticDemandGenerator(DemandGenerator):
    """Repeat the same orders in the same sequence.

    :param raw_piece_size: Size of a raw piece.
    :param orders: Sizes of the orders.
    """

    def __init__(self, raw_piece_size: Size, orders: Sequence[Size]) -> None:
        super().__init__()
        where = "core_env.demand_generator.orders"
        self.orders = [as_size(order, f"{where}[{index}]") for index, order in enumerate(orders)]
        if not self.orders:
            raise ConfigError(f"{where}: expected at least one order, found none.")
        for order in self.orders:
            if not fits(order, raw_piece_size) and not fits(order[::-1], raw_piece_size):
                raise ConfigError(f"{where}: {order} does not fit into a raw piece of size {raw_piece_size}.")
        self._n_orders = 0

    @override(DemandGenerator)
    def reset(self) -> None:
        self._n_orders = 0

    @override(DemandGenerator)
    def next_order(self) -> Size:
        order = self.orders[self._n_orders % len(self.orders)]
        self._n_orders += 1
        return order
