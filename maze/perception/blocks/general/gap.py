"""Global average pooling."""

from __future__ import annotations

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock


class GlobalAveragePoolingBlock(ShapeNormalizationBlock):
    """Average each channel over the image.

    Input `(batch, channels, height, width)`, output `(batch, channels)`.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=4, out_num_dims=2)

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        return {self.out_keys[0]: block_input[self.in_keys[0]].mean(dim=(-2, -1))}
