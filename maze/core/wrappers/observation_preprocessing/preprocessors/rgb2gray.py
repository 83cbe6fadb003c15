"""Conversion of colour images to grey ones."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.wrappers.observation_preprocessing.preprocessors.base import (
    PreProcessor,
    box_of,
    checked_axis,
    same_box,
)

_LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Weights of red, green and blue in what the eye sees as brightness (ITU-R BT.601)."""


class Rgb2GrayPreProcessor(PreProcessor):
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
        if space.shape[self.rgb_dim] != len(_LUMA):
            raise ConfigError(
                f"Rgb2GrayPreProcessor: expected three channels in dimension {rgb_dim} (`rgb_dim`) of the observation, "
                f"whose shape is {space.shape}."
            )
        self._space = same_box(space, (*space.shape[: self.rgb_dim], *space.shape[self.rgb_dim + 1 :]))
        self._is_integer = np.dtype(space.dtype).kind in "iu"

    @override(PreProcessor)
    def processed_shape(self) -> tuple[int, ...]:
        return self._space.shape

    @override(PreProcessor)
    def processed_space(self) -> spaces.Box:
        return self._space

    @override(PreProcessor)
    def process(self, observation: np.ndarray) -> np.ndarray:
        channels = np.moveaxis(observation, self.rgb_dim, 0)
        gray = channels[0] * _LUMA[0]
        gray += channels[1] * _LUMA[1]
        gray += channels[2] * _LUMA[2]
        return into_box(gray, self._space, self._is_integer)


def into_box(image: np.ndarray, space: spaces.Box, is_integer: bool) -> np.ndarray:
    """An average of values of a space, rounded or clipped so that it is in this space itself, as numbers go.

    :param image: `[*space.shape]`; the result has the same shape.
    """
    inside = np.rint(image) if is_integer else np.clip(image, space.low.flat[0], space.high.flat[0])
    converted: np.ndarray = inside.astype(space.dtype, copy=False)
    return converted
