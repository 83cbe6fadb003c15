"""Normalization with statistics that are learned while a training goes on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict
from maze.perception.program.network_program import Array, Places, ProgramReader

_RESOLUTION = 1e-7
"""A deviation below this share of the mean is the noise of float32: the entry is constant."""


class RunningNormalizationBlock(PerceptionBlock):
    """Subtracts the mean of all observations so far, divides by their standard deviation, and clips what comes of it.

    The input is an observation as the environment shows it, of any shape; each entry has statistics of its own. They
    are buffers of the network: wherever its weights go (checkpoints, worker processes, other machines, exported
    policies), they go as well. The block itself never changes them: a trainer does between a rollout and the next one
    (:class:`~maze.train.trainers.common.observation_statistics.ObservationStatistics`). Before the first of them, it
    only clips. Entries that do not vary are only shifted.

    :param clip: Largest absolute value of the result.
    :raises ConfigError: It is not positive.
    """

    count: torch.Tensor
    """float64 `[]`: number of observations."""
    mean: torch.Tensor
    """float64 `[*shape]`"""
    variance: torch.Tensor
    """float64 `[*shape]`"""
    offset: torch.Tensor
    """float32 `[*shape]`: what is subtracted."""
    scale: torch.Tensor
    """float32 `[*shape]`: what is divided by."""

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, clip: float = 10.0) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        if not clip > 0.0:
            raise ConfigAssertionError(f"{self.block_name}: `clip` must be positive, found {clip}.")
        self.clip = float(clip)
        shape = tuple(self.in_shapes[0])
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("offset", torch.zeros(shape))
        self.register_buffer("scale", torch.ones(shape))

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        (tensor,) = self.gather_inputs(block_input)
        return {self.out_keys[0]: ((tensor - self.offset) / self.scale).clamp(-self.clip, self.clip)}

    def learn(self, observed: CumulativeMovingMeanStd) -> None:
        """Takes further observations into account.

        :param observed: Their statistics, without those of any before; of the shape of the input, or of its last
            dimensions where the first ones count agents.
        """
        known = CumulativeMovingMeanStd()
        known.count, known.mean, known.var = self.count.item(), self.mean.cpu().numpy(), self.variance.cpu().numpy()
        known.merge(observed.count, observed.mean, observed.var)
        mean, variance = np.asarray(known.mean), np.asarray(known.var)
        deviation = np.sqrt(variance)
        scale = np.where(deviation <= _RESOLUTION * np.abs(mean), 1.0, deviation)
        self.count.fill_(known.count)
        for buffer, value in ((self.mean, mean), (self.variance, variance), (self.offset, mean), (self.scale, scale)):
            buffer.copy_(torch.from_numpy(value))

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        if self.offset.device.type != "cpu":
            raise reader.unreadable()
        return {self.out_keys[0]: reader.apply(_Normalized(self), inputs[self.in_keys[0]])}

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return f"from {int(self.count):,} observations, clipped to {self.clip:g}"


@dataclass(frozen=True, eq=False)
class _Normalized:
    """What the block computes, see :class:`maze.perception.program.network_program.Function`."""

    block: RunningNormalizationBlock

    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        block = self.block
        return ((tensors[0] - block.offset) / block.scale).clamp(-block.clip, block.clip)

    def in_numpy(self, *arrays: Array) -> Array:
        buffers = self.block._buffers  # found faster than attributes of a module
        normalized: Array = np.subtract(arrays[0], buffers["offset"].numpy())  # type: ignore[union-attr]
        np.divide(normalized, buffers["scale"].numpy(), out=normalized)  # type: ignore[union-attr]
        np.maximum(normalized, -self.block.clip, out=normalized)
        np.minimum(normalized, self.block.clip, out=normalized)
        return normalized
