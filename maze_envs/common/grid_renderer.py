"""Draw things on a grid."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from maze.core.annotations import override
from maze.core.rendering.renderer import Renderer

if TYPE_CHECKING:
    from maze.core.log_events.step_event_log import StepEventLog

_MARKERS = ("s", "o", "*", "D")


class GridRenderer(Renderer):
    """Draw the entry `drawing` of states: positions by the names of things.

    :param size: Cells of the grid along each side.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    @override(Renderer)
    def render(self, maze_state: Any, maze_action: Any, events: StepEventLog | None, **kwargs: Any) -> None:
        import matplotlib.pyplot as plt

        plt.figure("Grid", figsize=(5, 5))
        plt.clf()
        axes = plt.subplot(111, aspect="equal")
        for index, (name, positions) in enumerate(maze_state["drawing"].items()):
            if positions:
                xs, ys = zip(*positions, strict=True)
                axes.plot(xs, ys, _MARKERS[index % len(_MARKERS)], markersize=12, alpha=0.7, label=name)
        axes.set_xlim(-0.5, self.size - 0.5)
        axes.set_ylim(-0.5, self.size - 0.5)
        axes.set_title("" if maze_action is None else str(maze_action))
        axes.legend(loc="upper right")
        axes.grid(alpha=0.3)
        plt.draw()
