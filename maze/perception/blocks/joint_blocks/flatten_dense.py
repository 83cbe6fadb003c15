"""Flattening and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, PerceptionBlock, Shapes, TensorDict
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.flatten import FlattenBlock
from maze.perception.program.network_program import Places, ProgramReader


class FlattenDenseBlock(PerceptionBlock):
    """A :class:`FlattenBlock` followed by a :class:`DenseBlock`; their arguments are described there."""

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        num_flatten_dims: int,
        hidden_units: Sequence[int],
        non_lin: NonLinearity,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        out_key = self.out_keys[0]
        self.flatten_block = FlattenBlock(self.in_keys, f"{out_key}_flat", self.in_shapes, num_flatten_dims)
        self.dense_block = DenseBlock(
            f"{out_key}_flat", out_key, self.flatten_block.out_shapes(), hidden_units=hidden_units, non_lin=non_lin
        )
        self.output_units = self.dense_block.output_units

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        output: TensorDict = self.dense_block(self.flatten_block(block_input))
        return output

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return reader.module(self.dense_block, reader.module(self.flatten_block, inputs))

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"{self.flatten_block.extra_repr()}\n{self.dense_block.extra_repr()}"


class ConvolutionDense(PerceptionBlock):
    """Base of blocks of convolutions whose output is flattened and goes through dense layers."""

    conv_block: PerceptionBlock
    dense_block: FlattenDenseBlock

    def _stack(
        self, conv_block: PerceptionBlock, num_flatten_dims: int, hidden_units: Sequence[int], non_lin: NonLinearity
    ) -> None:
        self.conv_block = conv_block
        self.dense_block = FlattenDenseBlock(
            conv_block.out_keys, self.out_keys[0], conv_block.out_shapes(), num_flatten_dims, hidden_units, non_lin
        )
        self.output_units = self.dense_block.output_units

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        output: TensorDict = self.dense_block(self.conv_block(block_input))
        return output

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"{self.conv_block.extra_repr()}\n{self.dense_block.dense_block.extra_repr()}"
