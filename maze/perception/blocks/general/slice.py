"""Selection of one index."""

from __future__ import annotations

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict, axis_from_end


class SliceBlock(PerceptionBlock):
    """Select one index of a dimension and drop the dimension.

    :param slice_dim: The axis; negative, or counted with one batch dimension at 0.
    :param slice_idx: The index; negative: from the end.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, slice_dim: int, slice_idx: int) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.slice_dim = axis_from_end(self.block_name, "slice_dim", slice_dim, len(self.in_shapes[0]))
        self.slice_idx = slice_idx  # not resolved: -1 is the last step of sequences of any length

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensor = block_input[self.in_keys[0]]
        return {self.out_keys[0]: tensor.select(self.slice_dim, self.slice_idx)}
