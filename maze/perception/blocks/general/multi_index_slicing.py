"""Selection of several indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict, axis_from_end


class MultiIndexSlicingBlock(PerceptionBlock):
    """Select indices along one dimension and keep it (:class:`SliceBlock` drops it).

    :param select_dim: The axis; negative, or counted with one batch dimension at 0.
    :param select_idxs: The index or indices, in the order of the result.
    """

    select_index: torch.Tensor

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, select_dim: int, select_idxs: int | Sequence[int]
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        shape = self.in_shapes[0]
        indices = [select_idxs] if isinstance(select_idxs, int) else list(select_idxs)
        self.select_dim = axis_from_end(self.block_name, "select_dim", select_dim, len(shape))
        self.select_idxs = [index if index >= 0 else index + shape[self.select_dim] for index in indices]
        # A buffer moves with the module; it is a constant, not a state to save.
        self.register_buffer("select_index", torch.tensor(self.select_idxs, dtype=torch.long), persistent=False)

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensor = block_input[self.in_keys[0]]
        return {self.out_keys[0]: tensor.index_select(tensor.dim() + self.select_dim, self.select_index)}
