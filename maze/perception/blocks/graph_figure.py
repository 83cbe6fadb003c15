"""Drawing of a model graph with Matplotlib."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from maze.perception.blocks.graph_layout import Layout, Node, Point, layered_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from maze.perception.blocks.graph_drawing import GraphNode, ModelGraph

# All in points, 1/72 of an inch.
_PADDING = 7.0
_HORIZONTAL_GAP = 24.0
_VERTICAL_GAP = 26.0
_MARGIN = 14.0
_TITLE_HEIGHT = 26.0
_LINE_SPACING = 1.35
_ARROW_HEIGHT = 6.0
_POINTS_PER_INCH = 72.0

_EDGE_COLOUR = "#555555"


def draw_figure(graph: ModelGraph, font_size: float) -> Figure:
    """The figure, as large as its content needs."""
    from matplotlib.figure import Figure

    sizes: dict[Node, tuple[float, float]] = {
        name: _text_size(node.text, font_size) for name, node in graph.nodes.items()
    }
    layout = layered_layout(sizes, list(graph.edges), _HORIZONTAL_GAP, _VERTICAL_GAP)
    title_width = _text_size(graph.title, 1.4 * font_size)[0]
    width = max(layout.width, title_width) + 2 * _MARGIN
    height = layout.height + 2 * _MARGIN + _TITLE_HEIGHT
    figure = Figure(figsize=(width / _POINTS_PER_INCH, height / _POINTS_PER_INCH))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    left = -(width - layout.width) / 2
    axes.set_xlim(left, left + width)
    axes.set_ylim(layout.height + _MARGIN, -_MARGIN - _TITLE_HEIGHT)
    axes.set_axis_off()
    axes.text(
        layout.width / 2,
        -_MARGIN / 2 - _TITLE_HEIGHT / 2,
        graph.title,
        ha="center",
        va="center",
        size=1.4 * font_size,
        parse_math=False,
    )
    for edge in graph.edges:
        _draw_edge(axes, layout, edge, sizes)
    for name, node in graph.nodes.items():
        _draw_box(axes, node, layout.centres[name], sizes[name])
        axes.text(
            *layout.centres[name],
            node.text,
            ha="center",
            va="center",
            size=font_size,
            color=node.font_colour,
            linespacing=_LINE_SPACING * 0.9,
            parse_math=False,
        )
    return figure


def _text_size(text: str, font_size: float) -> tuple[float, float]:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(size=font_size)
    lines = text.split("\n")
    width = max(text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] for line in lines)
    return width + 2 * _PADDING, len(lines) * font_size * _LINE_SPACING + _PADDING


def _draw_box(axes: Axes, node: GraphNode, centre: Point, size: tuple[float, float]) -> None:
    from matplotlib.patches import FancyBboxPatch

    (x, y), (width, height) = centre, size
    style = "square,pad=0" if node.is_block else "round,pad=0,rounding_size=6"
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle=style,
            facecolor=node.fill,
            edgecolor=node.border,
            linewidth=1.8 if node.is_end else 0.9,
        )
    )


def _draw_edge(axes: Axes, layout: Layout, edge: tuple[str, str], sizes: dict[Node, tuple[float, float]]) -> None:
    """Vertical within layers, bent between them: an edge never leaves the room that the layout keeps for it."""
    from matplotlib.patches import PathPatch, Polygon
    from matplotlib.path import Path

    start, end = edge
    (start_x, start_y), (end_x, end_y) = layout.centres[start], layout.centres[end]
    vertices: list[Point] = [(start_x, start_y + sizes[start][1] / 2)]
    codes = [Path.MOVETO]
    for (upper, upper_x), (lower, lower_x) in pairwise(layout.routes[edge]):
        leave, arrive = layout.layer_bounds[upper][1], layout.layer_bounds[lower][0]
        arrive -= _ARROW_HEIGHT
        middle = (leave + arrive) / 2
        vertices += [(upper_x, leave), (upper_x, middle), (lower_x, middle), (lower_x, arrive)]
        codes += [Path.LINETO, Path.CURVE4, Path.CURVE4, Path.CURVE4]
    tip = end_y - sizes[end][1] / 2
    vertices.append((end_x, tip - _ARROW_HEIGHT))
    codes.append(Path.LINETO)
    axes.add_patch(PathPatch(Path(vertices, codes), linewidth=0.9, edgecolor=_EDGE_COLOUR, fill=False))
    corners = [(end_x, tip), *((end_x + side * _ARROW_HEIGHT / 3, tip - _ARROW_HEIGHT) for side in (-1, 1))]
    axes.add_patch(Polygon(corners, closed=True, color=_EDGE_COLOUR, linewidth=0))
