"""Conversion of colour images to grey ones."""

from __future__ import annotations

from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import LUMA, Gray
from maze.core.wrappers.observation_preprocessing.preprocessors.base import (
    ConvertingPreProcessor,
    box_of,
    checked_axis,
    image_values,
    same_box,
)


class Rgb2GrayPreProcessor(ConvertingPreProcessor):
    """Converts an image with the channels red, green and blue to one of their brightness, without channels.

    The type of the values stays: images of integers are rounded.

    :param observation_space: Space of the image.
    :param rgb_dim: The dimension of the channels.
    :param num_flatten_dims: Without effect; accepted because configurations in circulation contain it.
    :raises ConfigError: The dimension does not hold three channels.
    """

    def __init__(self, observation_space: spaces.Box, rgb_dim: int = -1, num_flatten_dims: int | None = None) -> None:
        super().__init__(observation_space)
        space = box_of(observation_space, "Rgb2GrayPreProcessor")
        self.rgb_dim = checked_axis(rgb_dim, len(space.shape), "Rgb2GrayPreProcessor: `rgb_dim`")
        if space.shape[self.rgb_dim] != len(LUMA):
            raise ConfigError(
                f"Rgb2GrayPreProcessor: expected three channels in dimension {rgb_dim} (`rgb_dim`) of the observation, "
                f"whose shape is {space.shape}."
            )
        gray = same_box(space, (*space.shape[: self.rgb_dim], *space.shape[self.rgb_dim + 1 :]))
        self._convert_by(Gray(*image_values(gray), axis=self.rgb_dim), gray)
