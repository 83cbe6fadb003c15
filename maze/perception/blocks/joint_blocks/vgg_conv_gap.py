"""VGG-style convolutions and global average pooling."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, PerceptionBlock, Shapes, TensorDict
from maze.perception.blocks.feed_forward.vgg_conv import VGGConvolutionBlock
from maze.perception.blocks.general.gap import GlobalAveragePoolingBlock


class VGGConvolutionGAPBlock(PerceptionBlock):
    """A :class:`VGGConvolutionBlock` followed by a :class:`GlobalAveragePoolingBlock`; arguments are described there.

    Input `(..., channels, height, width)`, output `(..., hidden_channels[-1])`.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, hidden_channels: Sequence[int], non_lin: NonLinearity
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        out_key = self.out_keys[0]
        self.conv_block = VGGConvolutionBlock(
            self.in_keys, f"{out_key}_conv", self.in_shapes, hidden_channels=hidden_channels, non_lin=non_lin
        )
        self.gap_block = GlobalAveragePoolingBlock(f"{out_key}_conv", out_key, self.conv_block.out_shapes())
        self.output_units = self.conv_block.output_channels

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        output: TensorDict = self.gap_block(self.conv_block(block_input))
        return output

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return self.conv_block.extra_repr()
