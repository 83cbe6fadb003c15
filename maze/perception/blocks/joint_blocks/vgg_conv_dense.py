"""VGG-style convolutions and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.perception.blocks.base import Keys, NonLinearity, Shapes
from maze.perception.blocks.feed_forward.vgg_conv import VGGConvolutionBlock
from maze.perception.blocks.joint_blocks.flatten_dense import ConvolutionDense


class VGGConvolutionDenseBlock(ConvolutionDense):
    """A :class:`VGGConvolutionBlock`, flattened, followed by a :class:`DenseBlock`; arguments are described there.

    Input `(..., channels, height, width)`, output `(..., hidden_units[-1])`.
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
        conv_block = VGGConvolutionBlock(
            self.in_keys, f"{self.out_keys[0]}_conv", self.in_shapes, hidden_channels=hidden_channels, non_lin=non_lin
        )
        self._stack(conv_block, 3, hidden_units, non_lin)
