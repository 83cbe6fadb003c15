"""VGG-style convolutions and global average pooling."""

from __future__ import annotations

from collections.abc import Sequence

from maze.perception.blocks.base import ChainBlock, Keys, NonLinearity, Shapes
from maze.perception.blocks.feed_forward.vgg_conv import VGGConvolutionBlock
from maze.perception.blocks.general.gap import GlobalAveragePoolingBlock


class VGGConvolutionGAPBlock(ChainBlock):
    """A :class:`VGGConvolutionBlock` followed by a :class:`GlobalAveragePoolingBlock`; arguments are described there.

    Input `(..., channels, height, width)`, output `(..., hidden_channels[-1])`.
    """

    stages = ("conv_block", "gap_block")

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
