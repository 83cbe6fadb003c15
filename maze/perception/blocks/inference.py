"""Blocks combined to one prediction module, and pictures of it."""

from __future__ import annotations

import io
import logging
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError, ConfigError, did_you_mean
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict
from maze.perception.program.network_program import Places, ProgramReader

logger = logging.getLogger(__name__)

_LINE_LENGTH = 46
_FONT_SIZE = 9.0
_DPI = 150
_FORMATS = ("pdf", "png", "svg")

_LIGHT_BLUE, _DEEP_BLUE, _BLOCK_BORDER = (0.91, 0.95, 1.0), (0.10, 0.32, 0.62), "#1f4e8c"
_TENSOR_FILL, _TENSOR_BORDER = "#fbe3e0", "#b83227"
_WHITE_TEXT_FROM = 0.55  # depth of blue


class InferenceBlock(PerceptionBlock):
    """A directed acyclic graph of blocks, linked by the keys of their tensors.

    Only the blocks that the `out_keys` depend on become part of this module; each is evaluated once per forward
    pass, in an order that is settled at construction. A tensor named by `in_keys` is taken from the input, so that
    `in_keys` can also cut a larger graph in the middle (shared embeddings).

    :param perception_blocks: The blocks by name, in any order.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, perception_blocks: Mapping[str, PerceptionBlock]
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.perception_blocks: dict[str, PerceptionBlock] = self._needed_blocks(perception_blocks)
        self.blocks = nn.ModuleDict(_module_names(self.perception_blocks))
        self._check_shapes()
        # The plan of a forward pass.
        self._steps = [(block, tuple(block.in_keys)) for block in self.perception_blocks.values()]
        used = {key for _, keys in self._steps for key in keys} | set(self.out_keys)
        self._used_in_keys = tuple(key for key in self.in_keys if key in used)

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        try:
            tensors = {key: block_input[key] for key in self._used_in_keys}
        except KeyError as error:
            raise self.missing_input_error(block_input) from error
        try:
            for block, keys in self._steps:
                tensors.update(block({key: tensors[key] for key in keys}))
            return {key: tensors[key] for key in self.out_keys}
        except KeyError as error:
            self._raise_if_not_delivered(error)
            raise

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        places = {key: inputs[key] for key in self._used_in_keys}
        for block, keys in self._steps:
            places.update(reader.module(block, {key: places[key] for key in keys}))
        return {key: places[key] for key in self.out_keys}

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"{', '.join(self.in_keys)} -> {', '.join(self.out_keys)}"

    @override(PerceptionBlock)
    def _infer_out_shapes(self) -> list[Sequence[int]]:
        shapes = self.tensor_shapes()
        return [shapes[key] for key in self.out_keys]

    def tensor_shapes(self) -> dict[str, Sequence[int]]:
        """The shapes (without batch) of all tensors of the graph: inputs, intermediate results and outputs."""
        shapes = dict(zip(self.in_keys, self.in_shapes, strict=True))
        for block in self.perception_blocks.values():
            produced = zip(block.out_keys, block.out_shapes(), strict=True)
            shapes.update({key: shape for key, shape in produced if key not in self.in_keys})
        return shapes

    def _needed_blocks(self, blocks: Mapping[str, PerceptionBlock]) -> dict[str, PerceptionBlock]:
        """The blocks that the outputs depend on, each after those that it depends on."""
        producers = self._producers(blocks)
        ordered: dict[str, PerceptionBlock] = {}

        def visit(key: str, wanted_by: str, path: tuple[str, ...]) -> None:
            if key in self.in_keys:
                return
            if key not in producers:
                raise self._missing_key_error(key, wanted_by, producers)
            name = producers[key]
            if name in path:
                circle = " -> ".join([*path[path.index(name) :], name])
                raise ConfigAssertionError(f"{self.block_name}: the blocks depend on each other in a cycle: {circle}.")
            if name in ordered:
                return
            for in_key in blocks[name].in_keys:
                visit(in_key, wanted_by=f"block {name!r}", path=(*path, name))
            ordered[name] = blocks[name]

        for out_key in self.out_keys:
            visit(out_key, wanted_by="`out_keys`", path=())
        return ordered

    def _producers(self, blocks: Mapping[str, PerceptionBlock]) -> dict[str, str]:
        """The name of the block that produces each key."""
        producers: dict[str, str] = {}
        for name, block in blocks.items():
            if not isinstance(block, PerceptionBlock):
                raise ConfigAssertionError(
                    f"{self.block_name}: `perception_blocks[{name!r}]` must be a PerceptionBlock, found "
                    f"{type(block).__name__}. Wrap plain PyTorch networks with TorchModelBlock."
                )
            for key in block.out_keys:
                if key in producers:
                    raise ConfigAssertionError(
                        f"{self.block_name}: the blocks {producers[key]!r} and {name!r} both produce {key!r}; "
                        "give each tensor its own key."
                    )
                producers[key] = name
        for name in _computable(blocks, self.in_keys):
            if clash := [key for key in blocks[name].out_keys if key in self.in_keys]:
                raise ConfigAssertionError(
                    f"{self.block_name}: {clash} {'is an input' if len(clash) == 1 else 'are inputs'} and also "
                    f"produced by block {name!r}; give the block's output its own key, or leave the block out."
                )
        return producers

    def _missing_key_error(self, key: str, wanted_by: str, producers: Iterable[str]) -> ConfigError:
        known = [*self.in_keys, *producers]
        return ConfigAssertionError(
            f"{self.block_name}: {wanted_by} needs {key!r}, which is neither an input nor produced by a block."
            f"{did_you_mean(key, known)} Known keys: {', '.join(known)}."
        )

    def _check_shapes(self) -> None:
        """Each block must have been declared with the shapes that will arrive."""
        shapes: dict[str, Sequence[int]] = dict(zip(self.in_keys, self.in_shapes, strict=True))
        sources = dict.fromkeys(self.in_keys, "the input")
        for name, block in self.perception_blocks.items():
            for key, declared in zip(block.in_keys, block.in_shapes, strict=True):
                if tuple(declared) != tuple(shapes[key]):
                    raise ConfigAssertionError(
                        f"{self.block_name}: block {name!r} was declared with shape {tuple(declared)} for its input "
                        f"{key!r}, but {sources[key]} has shape {tuple(shapes[key])}. Pass `out_shapes()` of the block "
                        "before, or the shape of the observation."
                    )
            for key, shape in zip(block.out_keys, block.out_shapes(), strict=True):
                shapes.setdefault(key, shape)
                sources.setdefault(key, f"block {name!r}")

    def _raise_if_not_delivered(self, cause: KeyError) -> None:
        for name, block in self.perception_blocks.items():
            if cause.args[0] in block.out_keys:
                raise ConfigAssertionError(
                    f"{self.block_name}: block {name!r} ({type(block).__name__}) did not return its output "
                    f"{cause.args[0]!r}."
                ) from cause


def _computable(blocks: Mapping[str, PerceptionBlock], in_keys: Sequence[str]) -> Iterator[str]:
    """Names of the blocks whose inputs all derive from `in_keys`."""
    available = set(in_keys)
    waiting = dict(blocks)
    while ready := [name for name, block in waiting.items() if available.issuperset(block.in_keys)]:
        for name in ready:
            available.update(waiting.pop(name).out_keys)
            yield name


def _module_names(blocks: Mapping[str, PerceptionBlock]) -> dict[str, PerceptionBlock]:
    """The blocks by names that PyTorch accepts for modules: no dots, no attribute of a module (`type`)."""
    reserved = set(dir(nn.ModuleDict()))
    taken = reserved | set(blocks)
    names: dict[str, PerceptionBlock] = {}
    for name, block in blocks.items():
        module_name = str(name)
        if "." in module_name or not module_name or module_name in reserved:
            module_name = f"block_{module_name.replace('.', '_')}"
            while module_name in taken:
                module_name += "_"
        taken.add(module_name)
        names[module_name] = block
    return names


class InferenceGraph:
    """A picture of an :class:`InferenceBlock`: blocks in blue, tensors in red, each with its shape.

    The deeper the blue, the larger the block's share of all parameters. Graphviz draws it if `pygraphviz` is installed
    (extra `graph`); otherwise the picture lists the blocks with their tensors as text.

    :param inference_block: The block to draw.
    """

    def __init__(self, inference_block: InferenceBlock) -> None:
        self.inference_block = inference_block

    def save(self, name: str, save_path: str | Path, formats: Sequence[str] = ("pdf", "png")) -> None:
        """Write `<save_path>/<name>.<format>` for each format.

        :param name: Stem of the files, and title of the picture.
        :param save_path: Directory; created where it does not exist.
        :param formats: Any of `pdf`, `png` and `svg`.
        :raises ConfigError: Another format is named.
        """
        if unknown := [suffix for suffix in formats if suffix not in _FORMATS]:
            raise ConfigError(f"Inference graph {name}: the format must be pdf, png or svg, found {unknown[0]!r}.")
        directory = Path(save_path)
        directory.mkdir(parents=True, exist_ok=True)
        graph = model_graph(self.inference_block, title=name)
        for suffix in formats:
            (directory / f"{name}.{suffix}").write_bytes(render(graph, suffix))

    def show(self, name: str, block_execution: bool) -> None:
        """Open a window of Matplotlib with the picture.

        :param name: Title of the picture.
        :param block_execution: Whether to wait until the window is closed.
        """
        from matplotlib import pyplot as plt

        image = plt.imread(io.BytesIO(render(model_graph(self.inference_block, title=name), "png")))
        figure = plt.figure(name)
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.imshow(image)
        axes.set_axis_off()
        plt.show(block=block_execution)


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


@dataclass(frozen=True)
class ModelGraph:
    """Nodes and edges of a picture."""

    title: str
    nodes: dict[str, GraphNode]
    edges: list[tuple[str, str]]


def model_graph(inference_block: InferenceBlock, title: str) -> ModelGraph:
    """Return tensors and blocks of an inference block with their texts and colours."""
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
        # the root makes small shares distinguishable
        nodes[f"block {name}"] = GraphNode(text, is_block=True, depth=share**0.5)
        edges += [(f"tensor {key}", f"block {name}") for key in block.in_keys]
        edges += [(f"block {name}", f"tensor {key}") for key in block.out_keys if key not in inference_block.in_keys]
    return ModelGraph(title=title, nodes=nodes, edges=edges)


def render(graph: ModelGraph, suffix: str) -> bytes:
    """Draw a picture, by Graphviz if it is installed and as text otherwise.

    :param suffix: `pdf`, `png` or `svg`.
    :return: The content of the file.
    """
    try:
        return _render_graphviz(graph, suffix)
    except ImportError:
        return _render_text(graph, suffix)
    except (OSError, ValueError) as error:  # pygraphviz without a working Graphviz
        logger.warning("Graphviz failed to draw %s; the picture lists its blocks as text: %s", graph.title, error)
        return _render_text(graph, suffix)


def _render_graphviz(graph: ModelGraph, suffix: str) -> bytes:
    import pygraphviz

    drawing = pygraphviz.AGraph(directed=True, strict=False)
    drawing.graph_attr.update(label=graph.title, labelloc="t", fontname="Helvetica", fontsize="14", ranksep="0.3")
    drawing.graph_attr.update(nodesep="0.3", dpi=str(_DPI if suffix == "png" else 72))  # vector formats count in points
    drawing.node_attr.update(shape="box", fontname="Helvetica", fontsize=str(_FONT_SIZE), margin="0.12,0.06")
    drawing.edge_attr.update(color="#555555", arrowsize="0.6")
    for name, node in graph.nodes.items():
        drawing.add_node(
            name,
            label=node.text.replace("\\", "\\\\"),
            style="filled" if node.is_block else "rounded,filled",
            fillcolor=node.fill,
            color=_BLOCK_BORDER if node.is_block else _TENSOR_BORDER,
            fontcolor="#ffffff" if node.depth >= _WHITE_TEXT_FROM else "#111111",
            penwidth="2" if node.is_end else "1",
        )
    drawing.add_edges_from(graph.edges)
    with warnings.catch_warnings():
        # Graphviz warns of missing system fonts and draws nevertheless.
        warnings.simplefilter("ignore", RuntimeWarning)
        picture: bytes = drawing.draw(format=suffix, prog="dot")
    return picture


def _render_text(graph: ModelGraph, suffix: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [graph.title, ""]
    for name, node in graph.nodes.items():
        if not node.is_block:
            continue
        ends = [[graph.nodes[other].text for other, end in graph.edges if end == name]]
        ends.append([graph.nodes[other].text for start, other in graph.edges if start == name])
        tensors = [", ".join(text.replace("\n", " ") for text in texts) for texts in ends]
        lines += [*node.text.splitlines(), f"    {' -> '.join(tensors)}", ""]
    line_height, width = _FONT_SIZE / 72 * 1.4, max(len(line) for line in lines) * _FONT_SIZE / 72 * 0.65
    figure = Figure(figsize=(width + 0.4, len(lines) * line_height + 0.4))
    FigureCanvasAgg(figure)
    style: Any = {"family": "monospace", "size": _FONT_SIZE, "linespacing": 1.4, "va": "center", "parse_math": False}
    figure.text(0.2 / (width + 0.4), 0.5, "\n".join(lines), **style)
    buffer = io.BytesIO()
    # Without a date the same model gives the same file.
    metadata: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}[suffix]
    figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata)
    return buffer.getvalue()


def _shape_text(shape: Any) -> str:
    return " x ".join(map(str, shape)) if len(shape) else "scalar"


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, _LINE_LENGTH)) or line
