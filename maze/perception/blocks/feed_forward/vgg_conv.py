"""VGG-style convolutions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.weight_init import activation_type


class VGGConvolutionBlock(ShapeNormalizationBlock):
    """Stages of two 3x3 convolutions, each followed by `non_lin`, and one 2x2 max-pooling.

    Input `(batch, channels, height, width)`, output `(batch, hidden_channels[-1], height / 2**n, width / 2**n)`
    with `n` stages, rounded down.

    :param hidden_channels: Number of channels of each stage.
    :param non_lin: The activation after each convolution.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, hidden_channels: Sequence[int], non_lin: NonLinearity
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=4, out_num_dims=4)
        self.input_channels = self.in_shapes[0][-3]
        self.hidden_channels = list(hidden_channels)
        self.output_channels = [self.input_channels, *self.hidden_channels][-1]
        self.non_lin = activation_type(non_lin, f"{self.block_name}.non_lin")
        self.net = nn.Sequential(self.build_layer_dict())

    def build_layer_dict(self) -> OrderedDict[str, nn.Module]:
        """Return the layers in order, by name."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        channels = [self.input_channels, *self.hidden_channels]
        for stage, (n_in, n_out) in enumerate(pairwise(channels)):
            for index, n_inputs in enumerate((n_in, n_out)):
                layers[f"conv_{stage}_{index}"] = nn.Conv2d(n_inputs, n_out, kernel_size=3, padding=1)
                layers[f"{self.non_lin.__name__}_{stage}_{index}"] = self.non_lin()
            layers[f"max_pool_{stage}"] = nn.MaxPool2d(kernel_size=2)
        return layers

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        return {self.out_keys[0]: self.net(block_input[self.in_keys[0]])}
