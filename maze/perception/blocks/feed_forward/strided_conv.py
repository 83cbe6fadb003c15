"""Strided convolutions in one to three dimensions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.weight_init import activation_type

Size: TypeAlias = int | tuple[int, ...]
"""One number for all spatial dimensions, or one each."""


class StridedConvolutionBlock(ShapeNormalizationBlock):
    """Stack of convolutions, each followed by `non_lin`.

    Input `(batch, channels, *spatial)`, output `(batch, hidden_channels[-1], *spatial)` with the spatial sizes that
    kernels, strides, dilations and paddings give.

    :param hidden_channels: Number of channels of each layer.
    :param hidden_kernels: Kernel size of each layer.
    :param non_lin: The activation after each layer.
    :param convolution_dimension: Number of spatial dimensions, 1 to 3.
    :param hidden_strides: Stride of each layer; None: 1.
    :param hidden_dilations: Distance of the kernel's elements in each layer; None: 1.
    :param hidden_padding: Padding on both sides in each layer; None: 0.
    :param padding_mode: `zeros`, `reflect`, `replicate` or `circular`; None: `zeros`.
    :raises ConfigError: There is not one setting for each layer.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_channels: Sequence[int],
        hidden_kernels: Sequence[Size],
        non_lin: NonLinearity,
        convolution_dimension: int,
        hidden_strides: Sequence[Size] | None,
        hidden_dilations: Sequence[Size] | None,
        hidden_padding: Sequence[Size] | None,
        padding_mode: str | None,
    ) -> None:
        n_dims = convolution_dimension + 2
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=n_dims, out_num_dims=n_dims)
        self.input_channels = self.in_shapes[0][-convolution_dimension - 1]
        self.hidden_channels = list(hidden_channels)
        self.output_channels = [self.input_channels, *self.hidden_channels][-1]
        self.convolution_dimension = convolution_dimension
        self.non_lin = activation_type(non_lin, f"{self.block_name}.non_lin")
        self.hidden_kernels = self._sizes("hidden_kernels", hidden_kernels, default=1)
        self.hidden_strides = self._sizes("hidden_strides", hidden_strides, default=1)
        self.hidden_dilations = self._sizes("hidden_dilations", hidden_dilations, default=1)
        self.hidden_padding = self._sizes("hidden_padding", hidden_padding, default=0)
        self.padding_mode = "zeros" if padding_mode is None else padding_mode
        self._gains_from_channels_last = (
            convolution_dimension == 2 and self.input_channels > 3 and min(self.hidden_kernels[0]) > 3
        )
        self.net = nn.Sequential(self.build_layer_dict())

    def build_layer_dict(self) -> OrderedDict[str, nn.Module]:
        """Return the layers in order, by name."""
        convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[self.convolution_dimension - 1]
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, (n_in, n_out) in enumerate(pairwise([self.input_channels, *self.hidden_channels])):
            layers[f"conv_{index}"] = convolution(
                n_in,
                n_out,
                kernel_size=self.hidden_kernels[index],
                stride=self.hidden_strides[index],
                padding=self.hidden_padding[index],
                dilation=self.hidden_dilations[index],
                padding_mode=self.padding_mode,
            )
            layers[f"{self.non_lin.__name__}_{index}"] = self.non_lin()
        return layers

    def in_fastest_layout(self, images: Tensor) -> Tensor:
        """Return inputs in the memory layout in which layers and gradients take the least time on this processor.

        Gradients of large kernels over more than three channels are computed up to three times as fast where channels
        are innermost; of others, and without gradients, the usual layout is faster. Graphics processors choose for
        themselves.

        :param images: `[batch, channels, height, width]`; other shapes are left alone.
        :return: The same values in the same shape.
        """
        is_wanted = self._gains_from_channels_last and torch.is_grad_enabled()
        if is_wanted and images.dim() == 4 and images.device.type == "cpu":
            return images.contiguous(memory_format=torch.channels_last)
        return images

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        return {self.out_keys[0]: self.net(self.in_fastest_layout(block_input[self.in_keys[0]]))}

    def _sizes(self, name: str, sizes: Sequence[Size] | None, default: int) -> list[tuple[int, ...]]:
        """Return one tuple with the size in each spatial dimension for each layer."""
        per_layer = [default] * len(self.hidden_channels) if sizes is None else list(sizes)
        n_dims = self.convolution_dimension
        tuples = [(size,) * n_dims if isinstance(size, int) else tuple(size) for size in per_layer]
        if not tuples or len(tuples) != len(self.hidden_channels) or any(len(size) != n_dims for size in tuples):
            raise ConfigAssertionError(
                f"{self.block_name}: `{name}` must hold one number, or one tuple of {n_dims} numbers, for each of the "
                f"{len(self.hidden_channels)} layers in `hidden_channels`; found {sizes}."
            )
        return tuples
