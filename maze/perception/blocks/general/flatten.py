"""Flattening."""

from __future__ import annotations

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict
from maze.perception.program.network_program import Places, ProgramReader


class FlattenBlock(PerceptionBlock):
    """Join the last `num_flatten_dims` dimensions to one.

    :param num_flatten_dims: Number of dimensions to join; 0 gives a scalar a dimension of size one.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, num_flatten_dims: int) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.num_flatten_dims = num_flatten_dims

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensor = block_input[self.in_keys[0]]
        if self.num_flatten_dims == 0:
            tensor = tensor.unsqueeze(-1)
        elif self.num_flatten_dims > 1:
            tensor = tensor.flatten(start_dim=-self.num_flatten_dims)
        return {self.out_keys[0]: tensor}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        return {self.out_keys[0]: reader.flatten(inputs[self.in_keys[0]], self.num_flatten_dims)}
