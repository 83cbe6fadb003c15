"""Plain PyTorch networks as blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock


class TorchModelBlock(ShapeNormalizationBlock):
    """Wrap a PyTorch network with shape inference and any number of leading batch dimensions.

    :param net: Maps a dictionary of tensors with `in_keys` to a dictionary of tensors with `out_keys`.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        in_num_dims: int | Sequence[int],
        out_num_dims: int | Sequence[int],
        net: torch.nn.Module,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=in_num_dims, out_num_dims=out_num_dims)
        self.net = net

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        outputs: TensorDict | torch.Tensor = self.net(block_input)
        if isinstance(outputs, torch.Tensor):
            raise ConfigAssertionError(
                f"{self.block_name}: {type(self.net).__name__} returned a tensor; return a dictionary with the keys "
                f"{self.out_keys}."
            )
        return outputs
