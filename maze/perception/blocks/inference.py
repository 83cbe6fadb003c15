"""Blocks combined to one network, networks that choose among candidates, and pictures of a network."""

from __future__ import annotations

import io
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from maze.console.streams import descriptor_silenced
from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError, did_you_mean
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict
from maze.perception.blocks.joint_blocks import set_blocks
from maze.perception.program.network_in_torch import evaluated_by_program
from maze.perception.program.network_program import Places, ProgramReader

_LINE_LENGTH = 46
_FONT_SIZE = 9.0
_DPI = 150
_TENSOR_FILL = "#fbe3e0"
_MODULE_ATTRIBUTES = frozenset(dir(nn.ModuleDict()))


class InferenceBlock(PerceptionBlock):
    """A directed acyclic graph of blocks, linked by the keys of their tensors.

    Only the blocks that the `out_keys` depend on become part of this module; each is evaluated once per forward
    pass, in an order that is settled at construction. A tensor named by `in_keys` is taken from the input, so that
    `in_keys` can also cut a larger graph in the middle (shared embeddings).

    :param perception_blocks: The blocks by name, in any order.
    :raises ConfigError: A tensor is produced twice or not at all, blocks depend on each other in a cycle, or shapes
        do not fit.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, perception_blocks: Mapping[str, PerceptionBlock]
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.perception_blocks: dict[str, PerceptionBlock] = self._needed_blocks(perception_blocks)
        self.blocks = nn.ModuleDict({_module_name(name): block for name, block in self.perception_blocks.items()})
        self._tensor_shapes: dict[str, Sequence[int]] = dict(zip(self.in_keys, self.in_shapes, strict=True))
        for name, block in self.perception_blocks.items():
            for key, declared in zip(block.in_keys, block.in_shapes, strict=True):
                if tuple(declared) != tuple(self._tensor_shapes[key]):
                    raise ConfigAssertionError(
                        f"{self.block_name}: block {name!r} was declared with shape {tuple(declared)} for its input "
                        f"{key!r}, which has shape {tuple(self._tensor_shapes[key])}. Pass `out_shapes()` of the block "
                        "before, or the shape of the observation."
                    )
            self._tensor_shapes = dict(zip(block.out_keys, block.out_shapes(), strict=True)) | self._tensor_shapes
        # The plan of a forward pass.
        self._steps = [(block, tuple(block.in_keys)) for block in self.perception_blocks.values()]
        used = {key for _, keys in self._steps for key in keys} | set(self.out_keys)
        self.used_in_keys = tuple(key for key in self.in_keys if key in used)
        """Inputs that the outputs depend on."""

    @override(PerceptionBlock)
    @evaluated_by_program
    def forward(self, block_input: TensorDict) -> TensorDict:
        try:
            tensors = {key: block_input[key] for key in self.used_in_keys}
        except KeyError as error:
            raise ConfigAssertionError(
                f"{self.block_name}: expected the input keys {list(self.used_in_keys)}, found {list(block_input)}. "
                "Check the keys of the observation."
            ) from error
        for block, keys in self._steps:
            tensors = {**block({key: tensors[key] for key in keys}), **tensors}  # given tensors take precedence
        return {key: tensors[key] for key in self.out_keys}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        places = {key: inputs[key] for key in self.used_in_keys}
        for block, keys in self._steps:
            places = {**reader.module(block, {key: places[key] for key in keys}), **places}
        return {key: places[key] for key in self.out_keys}

    @override(PerceptionBlock)
    def _infer_out_shapes(self) -> list[Sequence[int]]:
        return [self._tensor_shapes[key] for key in self.out_keys]

    def tensor_shapes(self) -> dict[str, Sequence[int]]:
        """Return the shapes (without batch) of all tensors of the graph: inputs, intermediate results and outputs."""
        return dict(self._tensor_shapes)

    def _needed_blocks(self, blocks: Mapping[str, PerceptionBlock]) -> dict[str, PerceptionBlock]:
        """Return the blocks that the outputs depend on, each after those that it depends on."""
        producers: dict[str, str] = {}
        for name, block in blocks.items():
            for key in block.out_keys:
                if producers.setdefault(key, name) != name:
                    raise ConfigAssertionError(
                        f"{self.block_name}: the blocks {producers[key]!r} and {name!r} both produce {key!r}; "
                        "give each tensor its own key."
                    )
        ordered: dict[str, PerceptionBlock] = {}

        def visit(key: str, wanted_by: str, path: tuple[str, ...]) -> None:
            if key in self.in_keys:
                return
            if key not in producers:
                known = [*self.in_keys, *producers]
                raise ConfigAssertionError(
                    f"{self.block_name}: {wanted_by} needs {key!r}, which is neither an input nor produced by a block."
                    f"{did_you_mean(key, known)} Known keys: {', '.join(known)}."
                )
            name = producers[key]
            if name in path:
                circle = " -> ".join([*path[path.index(name) :], name])
                raise ConfigAssertionError(f"{self.block_name}: the blocks depend on each other in a cycle: {circle}.")
            if name not in ordered:
                for in_key in blocks[name].in_keys:
                    visit(in_key, wanted_by=f"block {name!r}", path=(*path, name))
                ordered[name] = blocks[name]

        for out_key in self.out_keys:
            visit(out_key, wanted_by="`out_keys`", path=())
        return ordered


def _module_name(name: str) -> str:
    """Return a name that PyTorch accepts for modules: not empty, without dots, no attribute of a module (`type`)."""
    is_accepted = name and "." not in name and name not in _MODULE_ATTRIBUTES
    return name if is_accepted else f"block_{name.replace('.', '_')}"


@dataclass(frozen=True)
class _Rows:
    """Indices of gathered rows among those of all sets of the batch, `(n_rows,)` each."""

    before: torch.Tensor
    """Index before gathering."""
    now: torch.Tensor
    """Index after gathering."""
    n_before: int
    """Number of rows of a set before gathering."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of an action head: the largest possible number of rows, of which a batch often needs few."""

    items: str
    """Observation `(batch, n, features)` with a row for each candidate."""
    masks: tuple[str, ...]
    """Observations `(batch, n)`: rows that exist, and rows that may be chosen."""

    def gathered(self, inputs: TensorDict) -> tuple[TensorDict, _Rows] | None:
        """Reduce the inputs to the number of rows of the largest set of the batch.

        :param inputs: Inputs with any leading batch dimensions.
        :return: The inputs and the indices of their rows. `None`: gathering is not faster.
        """
        if torch.compiler.is_compiling() or not all(key in inputs for key in (self.items, *self.masks)):
            return None  # graphs cannot branch on values; blocks report missing inputs
        mask = inputs[self.masks[0]]
        if mask.numel() < set_blocks.MANY_ROWS or mask.is_cuda:
            return None
        exists = reduce(torch.logical_or, [inputs[key] > 0 for key in self.masks]).flatten(0, -2)
        counts = exists.sum(-1)
        n, n_kept = mask.shape[-1], int(counts.max())
        if not 0 < n_kept <= set_blocks.SHARE_WORTH_IT * n:
            return None
        before = exists.flatten().nonzero().squeeze(-1)
        n_gaps = torch.arange(len(exists), device=mask.device) * n_kept - (counts.cumsum(0) - counts)
        now = torch.arange(len(before), device=mask.device) + n_gaps.repeat_interleave(counts)
        gathered = dict(inputs)
        for key in (self.items, *self.masks):
            tensor, rest = inputs[key], inputs[key].shape[mask.dim() :]
            rows = tensor.reshape(-1, *rest).index_select(0, before)
            kept = tensor.new_zeros((len(exists) * n_kept, *rest)).index_copy_(0, now, rows)
            gathered[key] = kept.view(*mask.shape[:-1], n_kept, *rest)
        return gathered, _Rows(before, now, n)


class _NetworkWithCandidates(InferenceBlock):
    """A network whose outputs have other names than its tensors.

    Sets of candidates are computed with no more rows than the batch has: rows that do not exist have no influence on
    the outputs.

    :param names: Name of each of the `out_keys` in the outputs.
    :param candidates: Candidates of action heads.
    """

    def __init__(
        self,
        in_keys: list[str],
        out_keys: list[str],
        in_shapes: Sequence[Sequence[int]],
        perception_blocks: Mapping[str, PerceptionBlock],
        names: Mapping[str, str],
        candidates: Mapping[str, Candidates],
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, perception_blocks)
        self._names = dict(names)
        self._candidates = dict(candidates)

    @override(InferenceBlock)
    @evaluated_by_program
    def forward(self, block_input: TensorDict) -> TensorDict:
        places = {}
        for head, candidates in self._candidates.items():
            if (gathered := candidates.gathered(block_input)) is not None:
                block_input, places[head] = gathered
        outputs = {self._names[key]: tensor for key, tensor in super().forward(block_input).items()}
        for head, of_rows in places.items():
            if head in outputs:
                outputs[head] = _spread(outputs[head], of_rows)
        return outputs

    @override(InferenceBlock)
    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        places, gathered = {key: inputs[key] for key in self.used_in_keys}, {}
        for head, candidates in self._candidates.items():
            needed = (candidates.items, *candidates.masks)
            if all(key in places for key in needed) and not reader.is_for_population:
                gathered[head] = rows = set_blocks.GatheredRows(reader, [places[key] for key in candidates.masks])
                places |= {key: rows.of(places[key]) for key in needed}
        outputs = {self._names[key]: place for key, place in super().describe_forward(reader, places).items()}
        smallest = float(np.finfo(np.float32).min)
        return {
            key: gathered[key].spread(place, smallest) if key in gathered else place for key, place in outputs.items()
        }


def _spread(logits: torch.Tensor, rows: _Rows) -> torch.Tensor:
    """Restore the indices that the rows of logits had before gathering; the other logits are masked."""
    leading, chosen = logits.shape[:-1], logits.flatten().index_select(0, rows.now)
    spread = logits.new_full((leading.numel() * rows.n_before,), torch.finfo(logits.dtype).min)
    return spread.index_copy(0, rows.before, chosen).view(*leading, rows.n_before)


def network_of(
    in_shapes: Mapping[str, Sequence[int]],
    blocks: Mapping[str, PerceptionBlock],
    outputs: Mapping[str, str],
    candidates: Mapping[str, Candidates] | None = None,
) -> InferenceBlock:
    """Build a network of blocks, whose outputs may have the names of inputs.

    :param in_shapes: Shapes of its inputs, by key.
    :param blocks: The blocks by name.
    :param outputs: Tensor of each output.
    :param candidates: Candidates of action heads, if rows that do not exist have no influence on the outputs.
    """
    arguments = (list(in_shapes), list(outputs.values()), list(in_shapes.values()), blocks)
    if not candidates and all(name == key for key, name in outputs.items()):
        return InferenceBlock(*arguments)
    names = {name: key for key, name in outputs.items()}
    return _NetworkWithCandidates(*arguments, names=names, candidates=candidates or {})


def drawable(network: nn.Module) -> InferenceBlock | None:
    """Return the inference block in a network, or what its method `drawn` returns; `None`: it has neither."""
    with torch.random.fork_rng(devices=()):  # initial weights of blocks that are made for the picture
        parts: Any = (part.drawn() if hasattr(part, "drawn") else part for part in network.modules())  # type: ignore[operator]
        return next((part for part in parts if isinstance(part, InferenceBlock)), None)


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
        """
        directory = Path(save_path)
        directory.mkdir(parents=True, exist_ok=True)
        for suffix in formats:
            (directory / f"{name}.{suffix}").write_bytes(self.picture(name, suffix))

    def show(self, name: str, block_execution: bool) -> None:
        """Open a window of Matplotlib with the picture.

        :param name: Title of the picture.
        :param block_execution: Whether to wait until the window is closed.
        """
        from matplotlib import pyplot as plt

        axes = plt.figure(name).add_axes((0.0, 0.0, 1.0, 1.0))
        axes.imshow(plt.imread(io.BytesIO(self.picture(name, "png"))))
        axes.set_axis_off()
        plt.show(block=block_execution)

    def picture(self, title: str, suffix: str) -> bytes:
        """Return the content of a file with the picture.

        :param title: Title of the picture.
        :param suffix: `pdf`, `png` or `svg`.
        """
        total = max(1, self.inference_block.get_num_of_parameters())
        shapes, blocks = self.inference_block.tensor_shapes(), self.inference_block.perception_blocks
        tensors = {key: f"{_wrapped(key)}\n{' x '.join(map(str, shape)) or 'scalar'}" for key, shape in shapes.items()}
        texts, shares = {}, {}
        for name, block in blocks.items():
            n_parameters = block.get_num_of_parameters()
            shares[name] = n_parameters / total
            texts[name] = "\n".join(_wrapped(line.strip()) for line in repr(block).splitlines())
            if n_parameters:
                texts[name] += f"\n{n_parameters:,} parameters ({shares[name]:.1%})"
        try:
            import pygraphviz
        except ImportError:
            lines = [title]
            for name, block in blocks.items():
                ends = (", ".join(tensors[key] for key in keys) for keys in (block.in_keys, block.out_keys))
                lines.append(f"\n{texts[name]}\n    {' -> '.join(ends)}".replace("\n ", " "))
            return _drawn("\n".join(lines), suffix)
        graph = pygraphviz.AGraph(directed=True, strict=False)
        graph.graph_attr.update(label=title, labelloc="t", fontname="Helvetica", ranksep="0.3", nodesep="0.3")
        graph.graph_attr["dpi"] = str(_DPI if suffix == "png" else 72)  # vector formats count in points
        graph.node_attr.update(shape="box", style="filled", fontname="Helvetica", fontsize=str(_FONT_SIZE))
        for key, text in tensors.items():
            graph.add_node(f"tensor {key}", label=text.replace("\\", "\\\\"), fillcolor=_TENSOR_FILL)
        for name, block in blocks.items():
            # the root makes small shares distinguishable; black text stays readable on the deepest blue
            fill = f"0.6 {0.08 + 0.42 * shares[name] ** 0.5:.3f} 1.0"
            graph.add_node(f"block {name}", label=texts[name].replace("\\", "\\\\"), fillcolor=fill)
            graph.add_edges_from((f"tensor {key}", f"block {name}") for key in block.in_keys)
            produced = [key for key in block.out_keys if key not in self.inference_block.in_keys]
            graph.add_edges_from((f"block {name}", f"tensor {key}") for key in produced)
        # Missing fonts and unknown settings of fonts, without which Graphviz draws as well.
        with warnings.catch_warnings(), descriptor_silenced(2):
            warnings.simplefilter("ignore", RuntimeWarning)
            return graph.draw(format=suffix, prog="dot")  # type: ignore[no-any-return]


def _drawn(text: str, suffix: str) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure()
    FigureCanvasAgg(figure)
    figure.text(0.0, 0.0, text, family="monospace", size=_FONT_SIZE, parse_math=False)
    buffer = io.BytesIO()
    # Without a date the same model gives the same file.
    metadata: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(suffix, {})
    figure.savefig(buffer, format=suffix, dpi=_DPI, metadata=metadata, bbox_inches="tight")
    return buffer.getvalue()


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, _LINE_LENGTH)) or line
