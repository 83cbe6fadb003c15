"""Draw cuts and stocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.annotations import override
from maze.core.rendering.renderer import Renderer
from tutorial_maze_env.part01_core_env.env.maze_action import Cutting2DMazeAction
from tutorial_maze_env.part01_core_env.env.maze_state import Cutting2DMazeState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from maze.core.log_events.step_event_log import StepEventLog

Size = tuple[int, int]

_PIECE_COLOR = (0.8, 0.8, 0.8)
_ORDER_COLOR = (0.7, 0.2, 0.2)
_BACKENDS_WITHOUT_WINDOW = frozenset({"agg", "cairo", "pdf", "pgf", "ps", "svg", "template"})


class Cutting2DRenderer(Renderer):
    """Draw the selected piece with its cut on the left, and the stock on the right."""

    @override(Renderer)
    def render(
        self,
        maze_state: Cutting2DMazeState,
        maze_action: Cutting2DMazeAction | None,
        events: StepEventLog | None,
        **kwargs: Any,
    ) -> None:
        import matplotlib.pyplot as plt

        plt.figure("Cutting 2D", figsize=(8, 4))
        plt.clf()
        self._plot_maze_action(plt.subplot(121, aspect="equal"), maze_state, maze_action)
        self._plot_inventory(plt.subplot(122), maze_state, maze_action)
        plt.tight_layout()
        plt.draw()
        if plt.get_backend().lower() not in _BACKENDS_WITHOUT_WINDOW:
            plt.pause(0.1)

    @staticmethod
    def _plot_maze_action(axes: Axes, maze_state: Cutting2DMazeState, maze_action: Cutting2DMazeAction | None) -> None:
        axes.set_xlim(0, max(maze_state.raw_piece_size))
        axes.set_ylim(0, max(maze_state.raw_piece_size))
        piece = _selected_piece(maze_state, maze_action)
        if maze_action is None or piece is None:
            _add_title(axes, "MazeAction (none)" if maze_action is None else "MazeAction (no such piece)")
            return
        # Turning the order on the piece looks the same as turning the piece under the order.
        piece = piece[::-1] if maze_action.rotate else piece
        order = maze_state.current_demand
        _draw_piece(axes, piece, _PIECE_COLOR)
        _draw_piece(axes, order, _ORDER_COLOR)
        _draw_cutting_lines(axes, order, piece, maze_action.reverse_cutting_order != maze_action.rotate)
        _add_title(axes, "MazeAction")

    @staticmethod
    def _plot_inventory(axes: Axes, maze_state: Cutting2DMazeState, maze_action: Cutting2DMazeAction | None) -> None:
        pieces = np.sort(np.reshape(maze_state.inventory, (-1, 2)), axis=1)
        axes.plot(pieces[:, 0], pieces[:, 1], "ko", alpha=0.5, label="inventory pieces")
        order = sorted(maze_state.current_demand)
        axes.plot(order[0], order[1], "o", color=_ORDER_COLOR, alpha=0.75, label="current demand")
        piece = _selected_piece(maze_state, maze_action)
        if piece is not None:
            axes.plot(min(piece), max(piece), "bo", alpha=0.75, label="cutting inventory piece")
        axes.grid()
        axes.legend()
        axes.axis("equal")
        _add_title(axes, "Inventory Pieces")


def _selected_piece(maze_state: Cutting2DMazeState, maze_action: Cutting2DMazeAction | None) -> Size | None:
    if maze_action is None or not 0 <= maze_action.piece_id < len(maze_state.inventory):
        return None
    return maze_state.inventory[maze_action.piece_id]


def _add_title(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=16, fontweight="bold", loc="left")


def _draw_piece(axes: Axes, piece: Size, color: tuple[float, float, float]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((0, 0), piece[0], piece[1], facecolor=color))


def _draw_cutting_lines(axes: Axes, order: Size, piece: Size, is_horizontal_first: bool) -> None:
    """The first cut goes through the whole piece, the second one ends at the first."""
    length, height = (piece[0], order[1]) if is_horizontal_first else (order[0], piece[1])
    axes.plot((0, length), (order[1], order[1]), color="black", linestyle="--")
    axes.plot((order[0], order[0]), (0, height), color="black", linestyle="--")
