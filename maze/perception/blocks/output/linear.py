"""The linear layer in front of action heads and values."""

from __future__ import annotations

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.fast_layers import Linear
from maze.perception.program.network_program import Places, ProgramReader


class LinearOutputBlock(ShapeNormalizationBlock):
    """A single linear layer without activation.

    Input `(batch, features)`, output `(batch, output_units)`.

    :param output_units: Number of logits or values.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, output_units: int) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=2, out_num_dims=2)
        self.input_units = self.in_shapes[0][-1]
        self.output_units = output_units
        self.net = Linear(self.input_units, self.output_units)

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        return {self.out_keys[0]: self.net(block_input[self.in_keys[0]])}

    def set_bias(self, bias: float | np.ndarray) -> None:
        """Set the bias, such as to start with rare actions (see `weight_init.compute_sigmoid_bias`).

        Several values have the shape `[output_units]`.

        :param bias: One value for all output units, or one per unit.
        :raises ConfigError: The values are not one, or one per unit.
        """
        value = torch.as_tensor(bias, dtype=self.net.bias.dtype, device=self.net.bias.device)
        if value.dim() > 0 and value.shape != self.net.bias.shape:
            raise ConfigAssertionError(
                f"{self.block_name}: `bias` must be a number or hold {self.output_units} values, "
                f"found shape {tuple(value.shape)}."
            )
        with torch.no_grad():
            self.net.bias.copy_(value)

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return {self.out_keys[0]: reader.layer(self.net, inputs[self.in_keys[0]])}


class GaussianOutputBlock(ShapeNormalizationBlock):
    """Logits of a normal distribution with a standard deviation that does not depend on the observation.

    The means are outputs of a linear layer. The logarithms of the standard deviations are learned parameters, one for
    each component of the action (Schulman et al. 2015, Trust region policy optimization).

    Input `(batch, features)`, output `(batch, 2 * n_components)`: the means, then the logarithms.

    The latter are the bias of a linear layer whose weights are zero and frozen: acting in NumPy, populations of
    evolution strategies and exported policies then need no further kind of parameter.

    :param n_components: Number of components of the action.
    :param log_std: Logarithm of the standard deviations at first.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, n_components: int, log_std: float = 0.0
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=2, out_num_dims=2)
        n_features = self.in_shapes[0][-1]
        self.mean_layer = Linear(n_features, n_components)
        self.log_std_layer = torch.nn.Linear(n_features, n_components)
        torch.nn.init.zeros_(self.log_std_layer.weight)
        torch.nn.init.constant_(self.log_std_layer.bias, log_std)
        self.log_std_layer.weight.requires_grad_(False)

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        latent = block_input[self.in_keys[0]]
        return {self.out_keys[0]: torch.cat([self.mean_layer(latent), self.log_std_layer(latent)], dim=-1)}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        latent = inputs[self.in_keys[0]]
        parts = [reader.layer(layer, latent) for layer in (self.mean_layer, self.log_std_layer)]
        return {self.out_keys[0]: reader.concatenate(parts, axis=-1)}
