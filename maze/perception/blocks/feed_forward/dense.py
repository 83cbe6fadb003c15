"""Fully connected layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.fast_layers import Linear
from maze.perception.program.network_program import Places, ProgramReader
from maze.perception.weight_init import activation_type


class DenseBlock(ShapeNormalizationBlock):
    """Stack of linear layers, each followed by `non_lin`.

    Input `(batch, features)`, output `(batch, hidden_units[-1])`.

    :param hidden_units: Width of each layer.
    :param non_lin: The activation after each layer.
    :raises ConfigError: There is no layer.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, hidden_units: Sequence[int], non_lin: NonLinearity
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=2, out_num_dims=2)
        if not hidden_units:
            raise ConfigAssertionError(f"{self.block_name}: `hidden_units` is empty; give one width per layer.")
        self.input_units = self.in_shapes[0][-1]
        self.hidden_units = list(hidden_units)
        self.output_units = self.hidden_units[-1]
        self.non_lin = activation_type(non_lin, f"{self.block_name}.non_lin")
        self.net = nn.Sequential(self.build_layer_dict())

    def build_layer_dict(self) -> OrderedDict[str, nn.Module]:
        """Return the layers in order, by name."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        widths = [self.input_units, *self.hidden_units]
        for index, (n_in, n_out) in enumerate(pairwise(widths)):
            layers[f"linear_{index}"] = Linear(n_in, n_out)
            layers[f"{self.non_lin.__name__}_{index}"] = self.non_lin()
        return layers

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        features = block_input[self.in_keys[0]]
        return {self.out_keys[0]: self.net(features if features.is_floating_point() else features.float())}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return {self.out_keys[0]: reader.layer(self.net, inputs[self.in_keys[0]])}
