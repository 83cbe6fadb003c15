"""Transposition."""

from __future__ import annotations

from collections.abc import Sequence

from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import Transpose
from maze.core.wrappers.observation_preprocessing.preprocessors.base import ConvertingPreProcessor, box_of, checked_axis


class TransposePreProcessor(ConvertingPreProcessor):
    """Reorders the dimensions of an array, for instance from height, width, channels to channels, height, width.

    >>> TransposePreProcessor(spaces.Box(0, 1, (96, 64, 3)), axes=[2, 0, 1]).processed_shape()
    (3, 96, 64)

    :param observation_space: Space of the observation.
    :param axes: For each dimension of the result, the dimension of the observation that it is.
    :raises ConfigError: The axes are no order of the observation's dimensions.
    """

    def __init__(self, observation_space: spaces.Box, axes: Sequence[int]) -> None:
        super().__init__(observation_space)
        shape = box_of(observation_space, "TransposePreProcessor").shape
        self.axes = tuple(checked_axis(axis, len(shape), "TransposePreProcessor: `axes`") for axis in axes)
        if sorted(self.axes) != list(range(len(shape))):
            raise ConfigError(
                f"TransposePreProcessor: `axes` must name each of the observation's {len(shape)} dimensions once, got "
                f"{list(axes)}."
            )
        self._convert_by(Transpose(self.axes))
