"""Scaling of inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict
from maze.perception.program.network_program import Array, Places, ProgramReader


class ScalingBlock(PerceptionBlock):
    """Multiplies its input, of any shape and type, by constants: what is in the hundreds drowns what is not.

    :param scale: A factor for all numbers, or one for each entry of the last dimension.
    :raises ConfigError: The number of factors is none of the two.
    """

    factors: torch.Tensor

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, scale: float | Sequence[float]) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        factors = torch.tensor(scale, dtype=torch.float32)
        shape = tuple(self.in_shapes[0])
        if factors.dim() and (factors.dim() > 1 or shape[-1:] != tuple(factors.shape)):
            raise ConfigAssertionError(
                f"{self.block_name}: `scale` has the shape {tuple(factors.shape)}, but must be one number or one for "
                f"each entry of the last dimension of {self.in_keys[0]!r}, whose shape is {shape}."
            )
        self.register_buffer("factors", factors, persistent=False)

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        (tensor,) = self.gather_inputs(block_input)
        return {self.out_keys[0]: tensor * self.factors}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        if self.factors.device.type != "cpu":
            raise reader.unreadable()
        return {self.out_keys[0]: reader.apply(_Scaled(self), inputs[self.in_keys[0]])}

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"times {self.factors.item():.3g}" if not self.factors.dim() else f"times {len(self.factors)} factors"


@dataclass(frozen=True, eq=False)
class _Scaled:
    """What the block computes, see :class:`maze.perception.program.network_program.Function`."""

    block: ScalingBlock

    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0] * self.block.factors

    def in_numpy(self, *arrays: Array) -> Array:
        scaled: Array = np.multiply(arrays[0], self.block.factors.numpy(), dtype=np.float32)
        return scaled
