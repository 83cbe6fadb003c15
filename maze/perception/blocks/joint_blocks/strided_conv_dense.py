"""Strided convolutions and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.perception.blocks.base import Keys, NonLinearity, Shapes
from maze.perception.blocks.feed_forward.strided_conv import Size, StridedConvolutionBlock
from maze.perception.blocks.joint_blocks.flatten_dense import ConvolutionDense


class StridedConvolutionDenseBlock(ConvolutionDense):
    """A :class:`StridedConvolutionBlock`, flattened, followed by a :class:`DenseBlock`; arguments are described there.

    Input `(..., channels, *spatial)`, output `(..., hidden_units[-1])`.
    """

    conv_block: StridedConvolutionBlock

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_channels: Sequence[int],
        hidden_kernels: Sequence[Size],
        convolution_dimension: int,
        hidden_strides: Sequence[Size] | None,
        hidden_dilations: Sequence[Size] | None,
        hidden_padding: Sequence[Size] | None,
        padding_mode: str | None,
        hidden_units: Sequence[int],
        non_lin: NonLinearity,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        conv_block = StridedConvolutionBlock(
            self.in_keys,
            f"{self.out_keys[0]}_conv",
            self.in_shapes,
            hidden_channels=hidden_channels,
            hidden_kernels=hidden_kernels,
            non_lin=non_lin,
            convolution_dimension=convolution_dimension,
            hidden_strides=hidden_strides,
            hidden_dilations=hidden_dilations,
            hidden_padding=hidden_padding,
            padding_mode=padding_mode,
        )
        self._stack(conv_block, convolution_dimension + 1, hidden_units, non_lin)
