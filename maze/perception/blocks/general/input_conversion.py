"""Preparation of observations: encoding of categories, running normalisation, scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.perception.blocks.base import FunctionBlock, Keys, Shapes
from maze.perception.program.network_program import Array, Places, ProgramReader, UnreadableError


class CategoryEncodingBlock(FunctionBlock):
    """Encode each category of an observation as a unit vector, or by a learned embedding.

    Input `(..., *entries)` with integers, output `(..., width)`: the concatenated encodings of all entries, whose
    widths are the numbers of categories, or `embedding_dim`. A number outside its range is encoded as zeros. Fewer
    `num_categories` than entries describe the last dimensions; leading dimensions, such as time steps, stay.

    :param in_keys: Key of the categories.
    :param num_categories: Number of categories, one for all entries of the input or one for each of them.
    :param embedding_dim: Width of learned embeddings; `None`: unit vectors.
    :param start: Number of the first category, one for all entries or one for each of them.
    :raises ConfigError: The number of categories is not positive.
    """

    first: torch.Tensor
    offsets: torch.Tensor
    limits: torch.Tensor

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        num_categories: int | Sequence[int],
        embedding_dim: int | None = None,
        start: int | Sequence[int] = 0,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        shape = tuple(self.in_shapes[0])
        self.n_dims = len(shape)
        if np.ndim(num_categories):
            n_given = np.size(num_categories)
            fitting = [n for n in range(len(shape) + 1) if math.prod(shape[len(shape) - n :]) == n_given]
            self.n_dims = max(fitting, default=self.n_dims)
        n_entries = math.prod(shape[len(shape) - self.n_dims :])
        self.num_categories = self._one_for_each("num_categories", num_categories, n_entries)
        if min(self.num_categories, default=1) < 1:
            raise ConfigAssertionError(f"{self.block_name}: `num_categories` must be positive, found {num_categories}.")
        self.embedding_dim = embedding_dim
        sizes = torch.tensor(self.num_categories)
        self.register_buffer("first", torch.tensor(self._one_for_each("start", start, n_entries)), persistent=False)
        self.register_buffer("limits", sizes, persistent=False)
        self.register_buffer("offsets", sizes.cumsum(0) - sizes, persistent=False)
        # an additional row for numbers outside their range
        self.embedding = None if embedding_dim is None else torch.nn.Embedding(int(sizes.sum()) + 1, embedding_dim)

    @override(FunctionBlock)
    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        if self.embedding is not None:
            raise UnreadableError
        return super().describe_forward(reader, inputs)

    @override(FunctionBlock)
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        (tensor,) = tensors
        batch_shape = tensor.shape[: tensor.dim() - self.n_dims]
        categories = tensor.reshape(*batch_shape, -1).long() - self.first
        is_known = (categories >= 0) & (categories < self.limits)
        total = int(sum(self.num_categories))
        indices = torch.where(is_known, categories + self.offsets, total)
        if self.embedding is not None:
            encoded: torch.Tensor = self.embedding(indices) * is_known.unsqueeze(-1)
            return encoded.reshape(*batch_shape, -1)
        encoded = torch.zeros(*batch_shape, total + 1, device=tensor.device)
        return encoded.scatter(-1, indices, 1.0)[..., :total]

    @override(FunctionBlock)
    def in_numpy(self, *arrays: Array) -> Array:
        (array,) = arrays
        first, limits, offsets = self.first.numpy(), self.limits.numpy(), self.offsets.numpy()
        kept_shape = array.shape[: array.ndim - self.n_dims]
        categories = array.reshape(*kept_shape, len(limits)).astype(np.int64) - first
        is_known = (categories >= 0) & (categories < limits)
        total = int(sum(self.num_categories))
        encoded: Array = np.zeros((*kept_shape, total + 1), np.float32)
        np.put_along_axis(encoded, np.where(is_known, categories + offsets, total), 1.0, axis=-1)
        return encoded[..., :total]

    def _one_for_each(self, name: str, value: int | Sequence[int], n_entries: int) -> list[int]:
        numbers = [int(number) for number in np.ravel(value)]  # spaces state NumPy's numbers and arrays
        if not np.ndim(value):
            return numbers * n_entries
        if len(numbers) != n_entries:
            raise ConfigAssertionError(
                f"{self.block_name}: `{name}` has {len(numbers)} numbers, but the input {self.in_keys[0]!r} of the "
                f"shape {tuple(self.in_shapes[0])} has {n_entries} entries."
            )
        return numbers


# A deviation below this share of the mean is rounding noise of float32: the entry is constant.
_RESOLUTION = 1e-7


class RunningNormalizationBlock(FunctionBlock):
    """Subtract the mean of all observations so far, divide by their standard deviation, and clip the result.

    The input is an observation of any shape; each entry has its own statistics. They are buffers of the network and
    travel with its weights (checkpoints, worker processes, exported policies). Only the trainer changes them, between
    rollouts (:class:`~maze.train.trainers.common.observation_statistics.ObservationStatistics`). Without statistics the
    block only clips. Constant entries are only shifted.

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
    """float32 `[*shape]`: the subtrahend."""
    scale: torch.Tensor
    """float32 `[*shape]`: the divisor."""

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

    @override(FunctionBlock)
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        return ((tensors[0] - self.offset) / self.scale).clamp(-self.clip, self.clip)

    @override(FunctionBlock)
    def in_numpy(self, *arrays: Array) -> Array:
        buffers = vars(self)["_buffers"]  # found faster than attributes of a module
        normalized: Array = np.subtract(arrays[0], buffers["offset"].numpy())
        np.divide(normalized, buffers["scale"].numpy(), out=normalized)
        np.maximum(normalized, -self.clip, out=normalized)
        np.minimum(normalized, self.clip, out=normalized)
        return normalized

    def learn(self, observed: CumulativeMovingMeanStd) -> None:
        """Merge the statistics of further observations.

        :param observed: Statistics of the new observations only, of the shape of the input, or of its last
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


class ScalingBlock(FunctionBlock):
    """Multiply the input, of any shape and type, by constants, so that large numbers do not dominate small ones.

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

    @override(FunctionBlock)
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        return tensors[0] * self.factors

    @override(FunctionBlock)
    def in_numpy(self, *arrays: Array) -> Array:
        scaled: Array = np.multiply(arrays[0], self.factors.numpy(), dtype=np.float32)
        return scaled
