"""Concatenation of features."""

from __future__ import annotations

import torch

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict, axis_from_end
from maze.perception.program.network_program import Places, ProgramReader


class ConcatenationBlock(PerceptionBlock):
    """Concatenate the inputs in the order of `in_keys`; one input passes through unchanged.

    :param concat_dim: The axis to join; negative, or counted with one batch dimension at 0.
    :raises ConfigError: There is no such axis.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, concat_dim: int) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.concat_dim = axis_from_end(self.block_name, "concat_dim", concat_dim, len(self.in_shapes[0]))

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensors = [block_input[key] for key in self.in_keys]
        return {self.out_keys[0]: tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=self.concat_dim)}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return {self.out_keys[0]: reader.concatenate([inputs[key] for key in self.in_keys], self.concat_dim)}
