"""Bins as columns."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer


class BinRenderer(Renderer):
    """Draw how full each bin is; full ones are green, and the item that comes next stands beside them.

    :param capacity: Capacity of a bin.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity

    @override(Renderer)
    def render(
        self, maze_state: dict[str, np.ndarray], maze_action: Any | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        import matplotlib.pyplot as plt

        n_bins, item = int(maze_state["n_bins"]), int(maze_state["item"])
        room = maze_state["room"][:n_bins]
        plt.cla()
        colors = np.where(room == 0, "tab:green", "tab:blue")
        plt.bar(np.arange(n_bins), self._capacity - room, width=0.9, color=colors)
        plt.bar([n_bins + 1], [item], width=0.9, color="tab:orange")
        if maze_action is not None:
            level = int(maze_action["level"])
            places = np.flatnonzero(room == level)
            place = int(places[0]) if len(places) and level >= item else n_bins
            bottom = self._capacity - level if place < n_bins else 0
            plt.bar([place], [item], bottom=[bottom], width=0.9, color="none", edgecolor="tab:orange", linewidth=1.5)
        plt.axhline(self._capacity, color="black", linewidth=0.8)
        plt.ylim(0, 1.08 * self._capacity)
        plt.xlabel("bin")
        plt.ylabel("filled")
        bound = -(-int(maze_state["total"]) // self._capacity)
        plt.title(f"Item {int(maze_state['elapsed']) + 1} of size {item}: {n_bins} bins, at least {bound} needed")
