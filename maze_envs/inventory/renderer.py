"""Stock and what is under way, as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer


class InventoryRenderer(Renderer):
    """Draw stock, outstanding orders by the period of their arrival, and what is ordered now."""

    @override(Renderer)
    def render(
        self, maze_state: dict[str, np.ndarray], maze_action: Any | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        import matplotlib.pyplot as plt

        outstanding = maze_state["outstanding"].tolist()
        names = ["stock", *(f"in {period}" for period in range(1, len(outstanding) + 1))]
        heights = [maze_state["stock"].item(), *outstanding]
        colors = ["tab:blue", *["tab:cyan"] * len(outstanding)]
        for action, units in (maze_action or {}).items():
            names.append(f"{action} now")
            heights.append(int(units))
            colors.append("tab:orange")
        plt.cla()
        bars = plt.bar(names, heights, color=colors)
        plt.bar_label(bars)
        plt.axhline(0, color="black", linewidth=0.8)
        plt.ylabel("units")
        plt.title(f"Period {int(maze_state['elapsed'])}")
