"""Strided convolutions and dense layers."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, NonLinearity, PerceptionBlock, Shapes, TensorDict
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


LAYOUTS = ("HW", "HWC", "CHW")
"""Order of height, width and channels."""


class ImageDenseBlock(PerceptionBlock):
    """Scale an image and move its channels to the front, then apply a :class:`StridedConvolutionDenseBlock`.

    Input `(..., height, width)`, `(..., height, width, channels)` or `(..., channels, height, width)`, output
    `(..., hidden_units[-1])`.

    :param layout: `HW`, `HWC` or `CHW`.
    :param scale: Factor of the values, such as 1 / 255.
    :param hidden_channels: Number of channels of each convolution.
    :param hidden_kernels: Size of each kernel.
    :param hidden_strides: Stride of each convolution; `None`: 1.
    :param hidden_padding: Padding of each convolution; `None`: none.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation after each layer.
    :raises ConfigError: There is no such layout, or the input is not an image.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        layout: str,
        scale: float,
        hidden_channels: Sequence[int],
        hidden_kernels: Sequence[Size],
        hidden_strides: Sequence[Size] | None,
        hidden_padding: Sequence[Size] | None,
        hidden_units: Sequence[int],
        non_lin: NonLinearity,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        if layout not in LAYOUTS:
            raise ConfigAssertionError(
                f"{self.block_name}: `layout` must be one of {', '.join(LAYOUTS)}, found {layout!r}."
            )
        shape = tuple(self.in_shapes[0])
        *leading, first, second, third = (*shape[:-2], 1, *shape[-2:]) if layout == "HW" else shape
        if layout == "HWC":
            first, second, third = third, first, second
        self.layout = layout
        self.scale = scale
        image, out_key = f"{self.out_keys[0]}_image", self.out_keys[0]
        self.conv_block = StridedConvolutionDenseBlock(
            image,
            out_key,
            [(*leading, first, second, third)],
            hidden_channels=hidden_channels,
            hidden_kernels=hidden_kernels,
            convolution_dimension=2,
            hidden_strides=hidden_strides,
            hidden_dilations=None,
            hidden_padding=hidden_padding,
            padding_mode=None,
            hidden_units=hidden_units,
            non_lin=non_lin,
        )
        self.output_units = self.conv_block.output_units

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        image = block_input[self.in_keys[0]]
        if self.layout == "HW":
            image = image.unsqueeze(-3)
        elif self.layout == "HWC":
            image = image.movedim(-1, -3)
        # bytes are moved before the conversion to floats, which are larger
        floats = self.conv_block.conv_block.in_fastest_layout(image).float()
        image = image * self.scale if floats is image else floats.mul_(self.scale)
        output: TensorDict = self.conv_block({self.conv_block.in_keys[0]: image})
        return output
