"""Last time step of recurrent layers."""

from __future__ import annotations

from maze.perception.blocks.base import ChainBlock, Keys, NonLinearity, Shapes
from maze.perception.blocks.general.slice import SliceBlock
from maze.perception.blocks.recurrent.lstm import LSTMBlock


class LSTMLastStepBlock(ChainBlock):
    """The last time step of an :class:`LSTMBlock`, where the arguments are described.

    Input `(..., time, features)`, output `(..., hidden_size)`. With `bidirectional`, the backward LSTM has processed
    this time step only.
    """

    stages = ("lstm_block", "slice_block")

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
        super().__init__(in_keys, out_keys, in_shapes)
        out_key = self.out_keys[0]
        self.lstm_block = LSTMBlock(
            self.in_keys, f"{out_key}_lstm", self.in_shapes, hidden_size, num_layers, bidirectional, non_lin
        )
        self.slice_block = SliceBlock(
            f"{out_key}_lstm", out_key, self.lstm_block.out_shapes(), slice_dim=-2, slice_idx=-1
        )
        self.output_units = self.lstm_block.output_units
