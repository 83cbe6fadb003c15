"""VGG-style convolutions and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, PerceptionBlock, Shapes, TensorDict
from maze.perception.blocks.feed_forward.vgg_conv import VGGConvolutionBlock
from maze.perception.blocks.joint_blocks.flatten_dense import FlattenDenseBlock


class VGGConvolutionDenseBlock(PerceptionBlock):
    """A :class:`VGGConvolutionBlock`, flattened, followed by a :class:`DenseBlock`; arguments are described there.

    Input ``(..., channels, height, width)``, output ``(..., hidden_units[-1])``.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_channels: Sequence[int],
        hidden_units: Sequence[int],
        non_lin: NonLinearity,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        out_key = self.out_keys[0]
        self.conv_block = VGGConvolutionBlock(
            self.in_keys, f"{out_key}_conv", self.in_shapes, hidden_channels=hidden_channels, non_lin=non_lin
        )
        self.dense_block = FlattenDenseBlock(
            f"{out_key}_conv",
            out_key,
            self.conv_block.out_shapes(),
            num_flatten_dims=3,
            hidden_units=hidden_units,
            non_lin=non_lin,
        )
        self.output_units = self.dense_block.output_units

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        output: TensorDict = self.dense_block(self.conv_block(block_input))
        return output

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"{self.conv_block.extra_repr()}\n{self.dense_block.dense_block.extra_repr()}"
