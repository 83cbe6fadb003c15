"""Pictures of inference graphs, by Graphviz or by Matplotlib."""

from __future__ import annotations

import importlib.util
import io
import logging
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError, install_command
from maze.perception.blocks.graph_layout import Layout, Node, Point, layered_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from maze.perception.blocks.inference import InferenceBlock


logger = logging.getLogger(__name__)

_LINE_LENGTH = 46
_FONT_SIZE = 9.0
_DPI = 150
_MAX_PIXELS = 30_000  # per side of a picture

_LIGHT_BLUE, _DEEP_BLUE, _BLOCK_BORDER = (0.91, 0.95, 1.0), (0.10, 0.32, 0.62), "#1f4e8c"
_TENSOR_FILL, _TENSOR_BORDER = "#fbe3e0", "#b83227"
_WHITE_TEXT_FROM = 0.55  # depth of blue


@dataclass(frozen=True)
class GraphNode:
    """A box of the picture."""

    text: str
    is_block: bool
    depth: float = 0.0
    """Depth of the blue of a block, 0 to 1."""
    is_end: bool = False
    """Whether a tensor is an input or an output of the model."""

    @property
    def fill(self) -> str:
        """Colour of the box, as `#rrggbb`."""
        if not self.is_block:
            return _TENSOR_FILL
        mixed = (light + (deep - light) * self.depth for light, deep in zip(_LIGHT_BLUE, _DEEP_BLUE, strict=True))
        return "#" + "".join(f"{round(255 * value):02x}" for value in mixed)

    @property
    def border(self) -> str:
        return _BLOCK_BORDER if self.is_block else _TENSOR_BORDER

    @property
    def font_colour(self) -> str:
        return "#ffffff" if self.depth >= _WHITE_TEXT_FROM else "#111111"


@dataclass(frozen=True)
class ModelGraph:
    """What a picture shows."""

    title: str
    nodes: dict[str, GraphNode]
    edges: list[tuple[str, str]]


def model_graph(inference_block: InferenceBlock, title: str) -> ModelGraph:
    """The tensors and blocks of an inference block; text and colours are settled here."""
    total = inference_block.get_num_of_parameters()
    nodes: dict[str, GraphNode] = {}
    edges: list[tuple[str, str]] = []
    used = {key for block in inference_block.perception_blocks.values() for key in block.in_keys}
    ends = {*inference_block.in_keys, *inference_block.out_keys}
    for key, shape in inference_block.tensor_shapes().items():
        is_unused_input = key in inference_block.in_keys and key not in used and key not in inference_block.out_keys
        text = f"{_wrapped(key)}\n{_shape_text(shape)}" + ("\n(not used)" if is_unused_input else "")
        nodes[f"tensor {key}"] = GraphNode(text, is_block=False, is_end=key in ends)
    for name, block in inference_block.perception_blocks.items():
        n_parameters = block.get_num_of_parameters()
        share = n_parameters / total if total else 0.0
        text = "\n".join(_wrapped(line.strip()) for line in repr(block).splitlines() if line.strip())
        if n_parameters:
            text += f"\n{n_parameters:,} parameters ({share:.1%})"
        # By the root, so that small shares can still be told apart.
        nodes[f"block {name}"] = GraphNode(text, is_block=True, depth=share**0.5)
        edges += [(f"tensor {key}", f"block {name}") for key in block.in_keys]
        edges += [(f"block {name}", f"tensor {key}") for key in block.out_keys if key not in inference_block.in_keys]
    return ModelGraph(title=title, nodes=nodes, edges=edges)


def write_picture(graph: ModelGraph, path: Path, backend: str | None) -> None:
    """Writes the picture in the format of the path's suffix (pdf, png or svg).

    :raises ConfigError: There is no such format.
    """
    suffix = path.suffix.lstrip(".").lower()
    if suffix not in ("pdf", "png", "svg"):
        raise ConfigError(f"Inference graph {path.name}: the format must be pdf, png or svg, found {suffix!r}.")
    path.write_bytes(render(graph, suffix, backend))


def show_picture(graph: ModelGraph, backend: str | None, block_execution: bool) -> None:
    """Opens the picture in a window of Matplotlib."""
    from matplotlib import pyplot as plt

    image = plt.imread(io.BytesIO(render(graph, "png", backend)))
    figure = plt.figure(graph.title)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.imshow(image)
    axes.set_axis_off()
    plt.show(block=block_execution)


def render(graph: ModelGraph, suffix: str, backend: str | None) -> bytes:
    """The picture as the content of a file.

    :param suffix: `pdf`, `png` or `svg`.
    :param backend: `graphviz`, `matplotlib`, or None for the best one there is.
    :raises ConfigError: There is no such backend, or it is not installed.
    """
    if backend not in (None, *_BACKENDS):
        raise ConfigError(f"Inference graph: `backend` must be one of {', '.join(_BACKENDS)}, found {backend!r}.")
    if backend is None:
        if importlib.util.find_spec("pygraphviz") is None:
            return _render_matplotlib(graph, suffix)
        try:
            return _render_graphviz(graph, suffix)
        except (ImportError, OSError, ValueError) as error:  # pygraphviz without a working Graphviz
            logger.warning("Graphviz cannot draw %s, Matplotlib does: %s", graph.title, error)
            return _render_matplotlib(graph, suffix)
    return _BACKENDS[backend](graph, suffix)


def _render_graphviz(graph: ModelGraph, suffix: str) -> bytes:
    try:
        import pygraphviz
    except ImportError as error:
        raise ConfigError(
            f"Inference graph: the backend `graphviz` needs pygraphviz: {install_command('graph')}."
        ) from error
    drawing = pygraphviz.AGraph(directed=True, strict=False)
    drawing.graph_attr.update(
        label=graph.title,
        labelloc="t",
        fontname="Helvetica",
        fontsize="14",
        nodesep="0.3",
        ranksep="0.3",
        dpi=str(_DPI),
    )
    drawing.node_attr.update(shape="box", fontname="Helvetica", fontsize=str(_FONT_SIZE), margin="0.12,0.06")
    drawing.edge_attr.update(color="#555555", arrowsize="0.6")
    if suffix != "png":
        drawing.graph_attr.update(dpi="72")  # vector formats count in points
    for name, node in graph.nodes.items():
        drawing.add_node(
            name,
            label=node.text.replace("\\", "\\\\"),
            style="filled" if node.is_block else "rounded,filled",
            fillcolor=node.fill,
            color=node.border,
            fontcolor=node.font_colour,
            penwidth="2" if node.is_end else "1",
        )
    drawing.add_edges_from(graph.edges)
    with warnings.catch_warnings():
        # Remarks of Graphviz on fonts of the system; the picture is there or drawing fails.
        warnings.simplefilter("ignore", RuntimeWarning)
        picture: bytes = drawing.draw(format=suffix, prog="dot")
    return picture


def _render_matplotlib(graph: ModelGraph, suffix: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure: Figure = draw_figure(graph, font_size=_FONT_SIZE)
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    dpi = min(_DPI, _MAX_PIXELS / max(figure.get_size_inches()))
    # Without a date the same model gives the same file.
    metadata: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[suffix]
    figure.savefig(buffer, format=suffix, dpi=dpi, metadata=metadata)
    return buffer.getvalue()


_BACKENDS: dict[str, Callable[[ModelGraph, str], bytes]] = {
    "graphviz": _render_graphviz,
    "matplotlib": _render_matplotlib,
}


def _shape_text(shape: Any) -> str:
    return " x ".join(map(str, shape)) if len(shape) else "scalar"


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, _LINE_LENGTH)) or line


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
