"""Pictures of inference graphs, by Graphviz or by Matplotlib."""

from __future__ import annotations

import importlib.util
import io
import logging
import textwrap
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError

if TYPE_CHECKING:
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
        """Colour of the box, as ``#rrggbb``."""
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
    """Writes the picture in the format of the path's suffix (pdf, png or svg)."""
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

    :param suffix: ``pdf``, ``png`` or ``svg``.
    :param backend: ``graphviz``, ``matplotlib``, or None for the best one there is.
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
            "Inference graph: the backend `graphviz` needs pygraphviz: pip install 'maze-rl[graph]'."
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

    from maze.perception.blocks.graph_figure import draw_figure

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
