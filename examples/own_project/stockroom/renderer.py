"""Renderer."""

from __future__ import annotations

from typing import Any

from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer


class StockroomRenderer(Renderer):
    """Draw the stock of the morning; the delivered product is orange.

    :param shelf: Units that a shelf holds.
    """

    def __init__(self, shelf: int) -> None:
        self.shelf = shelf

    def render(self, maze_state: Any, maze_action: Any | None, events: StepEventLog, **kwargs: Any) -> None:
        import matplotlib.pyplot as plt

        plt.figure("Shelves", figsize=(5, 3)).clear()
        numbers = range(len(maze_state.stock))
        chosen = maze_action.number if maze_state.product is None and maze_action is not None else maze_state.product
        colors = ["tab:orange" if number == chosen else "tab:blue" for number in numbers]
        plt.bar([f"product {number}" for number in numbers], maze_state.stock, color=colors)
        plt.axhline(self.shelf, color="black", linewidth=0.8)
        plt.ylim(0, 1.1 * self.shelf)
        plt.ylabel("units")
        is_ordered = maze_state.product is not None and maze_action is not None
        ordered = f", {maze_action.number} lots of product {maze_state.product}" if is_ordered else ""
        plt.title(f"day {maze_state.day + 1}{ordered}")
        plt.tight_layout()
