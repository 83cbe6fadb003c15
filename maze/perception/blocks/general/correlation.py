"""Correlation of features."""

from __future__ import annotations

import torch

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict


class CorrelationBlock(PerceptionBlock):
    """Multiply two inputs element by element.

    Inputs `(..., features)` whose shapes are equal or broadcast; output of their common shape, or with `reduce`
    without the last dimension: the inner product of the feature vectors.

    :param reduce: Whether to sum over the last dimension.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, reduce: bool) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.reduce = reduce

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        first, second = [block_input[key] for key in self.in_keys]
        product = torch.mul(first, second)
        return {self.out_keys[0]: product.sum(dim=-1) if self.reduce else product}
