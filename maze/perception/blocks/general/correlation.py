"""Correlation of features."""

from __future__ import annotations

import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict


class CorrelationBlock(PerceptionBlock):
    """Multiply two inputs element by element.

    Inputs `(..., features)` whose shapes are equal or broadcast; output of their common shape, or with `reduce`
    without the last dimension: the inner product of the feature vectors.

    :param reduce: Whether to sum over the last dimension.
    :raises ConfigError: The inputs are not two, or cannot be multiplied.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, reduce: bool) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        if len(self.in_keys) != 2:
            raise ConfigAssertionError(f"{self.block_name}: expected two input keys, found {self.in_keys}.")
        self.reduce = reduce
        first, second = (tuple(shape) for shape in self.in_shapes)
        broadcasts = len(first) == len(second) and all(
            a == b or 1 in (a, b) for a, b in zip(first, second, strict=True)
        )
        if not broadcasts or (reduce and not first):
            raise ConfigAssertionError(
                f"{self.block_name}: the inputs must have equally many dimensions, of equal sizes or 1; found "
                f"{dict(zip(self.in_keys, self.in_shapes, strict=True))}."
            )

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        first, second = self.gather_inputs(block_input)
        product = torch.mul(first, second)
        return {self.out_keys[0]: product.sum(dim=-1) if self.reduce else product}

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"reduce: {self.reduce}"
