"""Global pooling with an optional mask."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict, axis_from_end, pool


class MaskedGlobalPoolingBlock(PerceptionBlock):
    """Pool unmasked features over one or more dimensions.

    The optional second input is the mask, positive for valid features. It has the shape of the features, or that of
    their first dimensions: a mask `(n,)` for features `(n, f)`. Without valid features the result is zero.

    :param in_keys: Key of the features, or keys of the features and of the mask.
    :param pooling_func: `mean`, `sum`, `max` or `min`.
    :param pooling_dim: The axis or axes to pool over, which the output does not have any more; negative, or counted
        with one batch dimension at 0.
    :raises ConfigError: There is no such function or axis.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, pooling_func: str, pooling_dim: int | Sequence[int]
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        n_dims = len(self.in_shapes[0])
        axes = [pooling_dim] if isinstance(pooling_dim, int) else list(pooling_dim)
        self.pooling_func = pooling_func
        self.pooling_dim = [axis_from_end(self.block_name, "pooling_dim", axis, n_dims) for axis in axes]
        self._n_unmasked_dims = n_dims - len(self.in_shapes[-1])

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        features, *masks = [block_input[key] for key in self.in_keys]
        valid = None
        if masks:
            valid = masks[0] > 0
            valid = valid.reshape(valid.shape + (1,) * self._n_unmasked_dims)
        return {self.out_keys[0]: pool(features, self.pooling_func, self.pooling_dim, valid)}
