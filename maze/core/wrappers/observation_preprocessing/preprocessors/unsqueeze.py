"""Insertion of a dimension."""

from __future__ import annotations

from gymnasium import spaces

from maze.core.utils.array_conversions import Reshape
from maze.core.wrappers.observation_preprocessing.preprocessors.base import ConvertingPreProcessor, box_of, checked_axis


class UnSqueezePreProcessor(ConvertingPreProcessor):
    """Inserts a dimension of size one, for instance the channel that a convolution needs.

    >>> UnSqueezePreProcessor(spaces.Box(0, 1, (96, 64)), dim=-3).processed_shape()
    (1, 96, 64)

    :param observation_space: Space of the observation.
    :param dim: Where the dimension is in the result; negative ones count from its right end.
    """

    def __init__(self, observation_space: spaces.Box, dim: int) -> None:
        super().__init__(observation_space)
        shape = box_of(observation_space, "UnSqueezePreProcessor").shape
        self.dim = checked_axis(dim, len(shape) + 1, "UnSqueezePreProcessor: `dim`, counted with the new one,")
        self._convert_by(Reshape((*shape[: self.dim], 1, *shape[self.dim :])))
