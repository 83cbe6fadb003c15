"""Recurrent layers."""

from __future__ import annotations

from torch import nn

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.weight_init import activation_type


class LSTMBlock(ShapeNormalizationBlock):
    """Stack of LSTM layers, and one linear layer with `non_lin` applied at each time step.

    Input `(batch, time, features)`, output `(batch, time, hidden_size)`. The state starts at zero.

    :param hidden_size: Number of features of the state, and of the output.
    :param num_layers: Number of LSTM layers.
    :param bidirectional: Whether a second LSTM runs from the last time step to the first.
    :param non_lin: The activation of the output.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_size: int,
        num_layers: int,
        bidirectional: bool,
        non_lin: NonLinearity,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=3, out_num_dims=3)
        self.input_units = self.in_shapes[0][-1]
        self.hidden_size = self.output_units = hidden_size
        self.num_layers = num_layers
        self.bidirectional = bidirectional
        self.non_lin = activation_type(non_lin, f"{self.block_name}.non_lin")
        self.net = nn.LSTM(
            self.input_units, hidden_size, num_layers=num_layers, bidirectional=bidirectional, batch_first=True
        )
        self.output = nn.Sequential(nn.Linear(hidden_size * (1 + bidirectional), hidden_size), self.non_lin())

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        states, _ = self.net(block_input[self.in_keys[0]])
        return {self.out_keys[0]: self.output(states)}
