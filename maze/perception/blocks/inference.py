"""Blocks combined to one prediction module, and pictures of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError, ConfigError, did_you_mean
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict
from maze.perception.program.network_program import Places, ProgramReader


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

    The deeper the blue, the larger the block's share of all parameters. Drawn by Graphviz where `pygraphviz` is
    installed (`pip install "maze-rl[graph]>=1"`), and otherwise by a layout of our own and Matplotlib.

    :param inference_block: The block to draw.
    :param backend: `graphviz`, `matplotlib`, or `None` for the best one there is.
    """

    def __init__(
        self, inference_block: InferenceBlock, backend: Literal["graphviz", "matplotlib"] | None = None
    ) -> None:
        self.inference_block = inference_block
        self.backend = backend

    def save(self, name: str, save_path: str | Path, formats: Sequence[str] = ("pdf", "png")) -> None:
        """Writes `<save_path>/<name>.<format>` for each format.

        :param name: Stem of the files, and title of the picture.
        :param save_path: Directory; created where it does not exist.
        :param formats: Any of `pdf`, `png` and `svg`.
        """
        from maze.perception.blocks.graph_drawing import model_graph, write_picture

        directory = Path(save_path)
        directory.mkdir(parents=True, exist_ok=True)
        graph = model_graph(self.inference_block, title=name)
        for suffix in formats:
            write_picture(graph, directory / f"{name}.{suffix}", self.backend)

    def show(self, name: str, block_execution: bool) -> None:
        """Opens a window with the picture.

        :param name: Title of the picture.
        :param block_execution: Whether to wait until the window is closed.
        """
        from maze.perception.blocks.graph_drawing import model_graph, show_picture

        show_picture(model_graph(self.inference_block, title=name), self.backend, block_execution)
