"""Flattening and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.perception.blocks.base import ChainBlock, Keys, NonLinearity, PerceptionBlock, Shapes
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.flatten import FlattenBlock


class FlattenDenseBlock(ChainBlock):
    """A :class:`FlattenBlock` followed by a :class:`DenseBlock`; their arguments are described there.

    Input `(..., *shape)` with `num_flatten_dims` dimensions in `shape`, output `(..., hidden_units[-1])`.
    """

    stages = ("flatten_block", "dense_block")

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


class ConvolutionDense(ChainBlock):
    """Base of blocks of convolutions whose output is flattened and processed by dense layers."""

    stages = ("conv_block", "dense_block")

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
