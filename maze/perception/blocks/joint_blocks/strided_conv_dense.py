"""Strided convolutions and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, PerceptionBlock, Shapes, TensorDict
from maze.perception.blocks.feed_forward.strided_conv import Size, StridedConvolutionBlock
from maze.perception.blocks.joint_blocks.flatten_dense import FlattenDenseBlock


class StridedConvolutionDenseBlock(PerceptionBlock):
    """A :class:`StridedConvolutionBlock`, flattened, followed by a :class:`DenseBlock`; arguments are described there.

    Input ``(..., channels, *spatial)``, output ``(..., hidden_units[-1])``.
    """

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
        out_key = self.out_keys[0]
        self.conv_block = StridedConvolutionBlock(
            self.in_keys,
            f"{out_key}_conv",
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
        self.dense_block = FlattenDenseBlock(
            f"{out_key}_conv",
            out_key,
            self.conv_block.out_shapes(),
            num_flatten_dims=convolution_dimension + 1,
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
