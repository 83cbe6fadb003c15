"""Resizing of images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import Resize
from maze.core.wrappers.observation_preprocessing.preprocessors.base import (
    ConvertingPreProcessor,
    box_of,
    image_values,
    same_box,
)


class ResizeImgPreProcessor(ConvertingPreProcessor):
    """Resizes an image: bilinear where it grows, and averaged over the covered area where it shrinks.

    The results are those of Pillow's `BILINEAR` filter. The type of the values stays: images of integers are rounded.

    :param observation_space: Space of the image: `(height, width)`, `(height, width, channels)`, or with
        `transpose` `(channels, height, width)`.
    :param target_size: Height and width of the result.
    :param transpose: Whether the channels come first, before and after resizing.
    :raises ConfigError: The observation is no image of that layout, or the size is not two numbers.
    """

    def __init__(self, observation_space: spaces.Box, target_size: Sequence[int], transpose: bool) -> None:
        super().__init__(observation_space)
        space = box_of(observation_space, "ResizeImgPreProcessor")
        size = tuple(target_size)
        if len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
            raise ConfigError(f"ResizeImgPreProcessor: `target_size` must be [height, width], got {target_size!r}.")
        n_dims = len(space.shape)
        if n_dims not in ((3,) if transpose else (2, 3)):
            wanted = "(channels, height, width)" if transpose else "(height, width) or (height, width, channels)"
            raise ConfigError(
                f"ResizeImgPreProcessor: with `transpose: {str(bool(transpose)).lower()}` an image has the shape "
                f"{wanted}, found {space.shape}."
            )
        self.transpose = transpose
        shape = (space.shape[0], *size) if transpose else (*size, *space.shape[2:])
        height, width = space.shape[1:] if transpose else space.shape[:2]
        resized = same_box(space, shape)
        conversion = Resize(
            *image_values(resized),
            rows=resampling_weights(height, size[0]),
            columns=resampling_weights(width, size[1]),
            has_channels_last=n_dims == 3 and not transpose,
        )
        self._convert_by(conversion, resized)


def resampling_weights(size: int, target_size: int) -> np.ndarray:
    """Share of each old pixel in each new one, along one dimension.

    A triangle around the centre of the new pixel, as wide as the distance between pixels on the coarser grid.

    :param size: Number of old pixels.
    :param target_size: Number of new pixels.
    :return: `[target_size, size]`; rows add up to one.
    """
    scale = size / target_size
    width = max(scale, 1.0)
    centers = (np.arange(target_size) + 0.5) * scale
    distances = np.abs(np.arange(size)[None, :] + 0.5 - centers[:, None]) / width
    weights = np.maximum(0.0, 1.0 - distances)
    normalized: np.ndarray = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
    return normalized
