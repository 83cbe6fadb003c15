"""Pre-processors of observations."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import LUMA, ArrayConversion, Gray, OneHot, Reshape, Resize, Transpose


class PreProcessor(ABC):
    """Convert one observation, and its space.

    The converted observation is called `<name>-<tag>`.

    :param observation_space: Space of the observation to convert.
    :param kwargs: Settings of the subclass, the `config` of its entry in the wrapper's configuration.
    """

    _tag: ClassVar[str | None] = None

    def __init_subclass__(cls, tag: str | None = None) -> None:
        """Define a pre-processor.

        :param tag: Its tag; `None`: the name of the file that defines the class.
        """
        super().__init_subclass__()
        cls._tag = tag

    def __init__(self, observation_space: spaces.Space[Any], **kwargs: Any) -> None:
        self._original_observation_space: Any = observation_space

    @abstractmethod
    def processed_shape(self) -> tuple[int, ...]:
        """Return shape of the converted observation."""

    @abstractmethod
    def processed_space(self) -> spaces.Space[Any]:
        """Return space of the converted observation."""

    @abstractmethod
    def process(self, observation: np.ndarray) -> np.ndarray:
        """Convert an observation; the given array is not modified.

        :param observation: `[*space.shape]` of the original space.
        """

    def conversion(self) -> ArrayConversion | None:
        """Return :meth:`process` as data, for exported policies; `None`: it cannot be exported."""
        return None

    def tag(self) -> str:
        """Return the tag that is appended to the name of the observation."""
        if self._tag is not None:
            return self._tag
        module = type(self).__module__
        return Path(inspect.getfile(type(self))).stem if module == "__main__" else module.rpartition(".")[2]


class ConvertingPreProcessor(PreProcessor):
    """A pre-processor that consists of a conversion and the converted space."""

    def _convert_by(self, conversion: ArrayConversion, space: spaces.Box | None = None) -> None:
        """Set the conversion; called at the end of constructors.

        :param space: Space of the converted observation; `None`: that of the converted bounds.
        """
        self._conversion = conversion
        if space is None:
            given = self._original_observation_space
            space = spaces.Box(conversion(given.low), conversion(given.high), dtype=given.dtype.type)
        self._processed_space = space

    @override(PreProcessor)
    def processed_shape(self) -> tuple[int, ...]:
        return self._processed_space.shape

    @override(PreProcessor)
    def processed_space(self) -> spaces.Box:
        return self._processed_space

    @override(PreProcessor)
    def conversion(self) -> ArrayConversion:
        return self._conversion

    @override(PreProcessor)
    def process(self, observation: np.ndarray) -> np.ndarray:
        return self._conversion(observation)


def box_of(space: spaces.Space[Any], processor: str) -> spaces.Box:
    """Return the space, checked to be a Box.

    :param space: Space of an observation.
    :param processor: Name of the pre-processor, for the message.
    :raises ConfigError: It is not a Box.
    """
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"{processor}: expected an observation with a Box space, found {space}.")
    return space


def same_box(space: spaces.Box, shape: tuple[int, ...]) -> spaces.Box:
    """Return a Box of another shape with the same bounds for all entries.

    :param space: A Box. Its type, the smallest of its lower and the largest of its upper bounds are taken over.
    :param shape: The shape.
    """
    return spaces.Box(space.low.min(), space.high.max(), shape, dtype=space.dtype.type)


def image_values(space: spaces.Box) -> tuple[str, float, float]:
    """Return type, smallest and largest value of an image.

    :param space: Space of the image, with the same bounds for all entries, such as that of :func:`same_box`.
    """
    return str(space.dtype), float(space.low.flat[0]), float(space.high.flat[0])


def checked_axis(axis: int, n_dims: int, what: str) -> int:
    """Return an axis, counted from the left.

    :param axis: Axis; negative ones count from the right.
    :param n_dims: Number of dimensions.
    :param what: Name of the argument, for the message.
    :raises ConfigError: The observation has no such axis.
    """
    if type(axis) is not int or not -n_dims <= axis < n_dims:
        raise ConfigError(f"{what} must be an axis of the observation's {n_dims} dimensions, found {axis!r}.")
    return axis % n_dims


class FlattenPreProcessor(ConvertingPreProcessor, tag="flatten"):
    """Join the last dimensions of an array: `(..., a, b)` becomes `(..., a * b)`.

    >>> FlattenPreProcessor(spaces.Box(0, 1, (4, 3, 2)), num_flatten_dims=2).processed_shape()
    (4, 6)

    :param observation_space: Space of the observation.
    :param num_flatten_dims: Number of dimensions to join, counted from the last one.
    :raises ConfigError: The observation has fewer dimensions.
    """

    def __init__(self, observation_space: spaces.Box, num_flatten_dims: int) -> None:
        super().__init__(observation_space)
        space = box_of(observation_space, "FlattenPreProcessor")
        n_dims = len(space.shape)
        if type(num_flatten_dims) is not int or not 1 <= num_flatten_dims <= n_dims:
            raise ConfigError(
                f"FlattenPreProcessor: expected `num_flatten_dims` from 1 to {n_dims}, found {num_flatten_dims!r}."
            )
        kept = space.shape[: n_dims - num_flatten_dims]
        self._convert_by(Reshape((*kept, int(np.prod(space.shape[len(kept) :])))))


_MAX_CATEGORIES = 2**16


class OneHotPreProcessor(ConvertingPreProcessor, tag="one_hot"):
    """Encode categories as vectors of zeros with a single one.

    For Discrete spaces, and for MultiDiscrete and bounded Box spaces of whole numbers (of any type), whose encoded
    entries are concatenated.

    >>> OneHotPreProcessor(spaces.Discrete(3)).process(np.int64(1))
    array([0., 1., 0.], dtype=float32)

    :param observation_space: Space of the observation.
    :raises ConfigError: The space is of another kind, or a Box with more than 65,536 values in total.
    """

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space)
        conversion = OneHot(*_categories(observation_space))
        self._convert_by(conversion, spaces.Box(0.0, 1.0, (int(conversion.counts.sum()),), dtype=np.float32))


def _categories(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest value and the number of values of each entry."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.start], dtype=np.int64), np.array([space.n], dtype=np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.reshape(-1).astype(np.int64), space.nvec.reshape(-1).astype(np.int64)
    if isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).all():
        bounds = np.stack([space.low, space.high]).reshape(2, -1)
        low, high = bounds.astype(object)
        counts = high - low + 1
        if (np.floor(bounds) == bounds).all() and counts.sum() <= _MAX_CATEGORIES:
            return low.astype(np.int64), counts.astype(np.int64)
    raise ConfigError(
        "OneHotPreProcessor: expected an observation of categories, with a Discrete, a MultiDiscrete, or a bounded "
        f"Box space of whole numbers with at most {_MAX_CATEGORIES} values in total, found {space}."
    )


class ResizeImgPreProcessor(ConvertingPreProcessor, tag="resize_img"):
    """Resize an image: bilinear interpolation when enlarging, area averages when shrinking.

    The results are those of Pillow's `BILINEAR` filter. The type of the values is kept: images of integers are rounded.

    :param observation_space: Space of the image: `(height, width)`, `(height, width, channels)`, or with
        `transpose` `(channels, height, width)`.
    :param target_size: Height and width of the result.
    :param transpose: Whether the channels come first, before and after resizing.
    :raises ConfigError: The observation is not an image of that layout, or the size is not two numbers.
    """

    def __init__(self, observation_space: spaces.Box, target_size: Sequence[int], transpose: bool) -> None:
        super().__init__(observation_space)
        space = box_of(observation_space, "ResizeImgPreProcessor")
        size = tuple(target_size)
        if len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
            raise ConfigError(f"ResizeImgPreProcessor: `target_size` must be [height, width], found {target_size!r}.")
        n_dims = len(space.shape)
        if n_dims not in ((3,) if transpose else (2, 3)):
            raise ConfigError(
                "ResizeImgPreProcessor: expected an image (height, width) or (height, width, channels), with "
                f"`transpose: true` (channels, height, width); found {space.shape}."
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
    """Return the share of each old pixel in each new one, along one dimension.

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
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


class Rgb2GrayPreProcessor(ConvertingPreProcessor, tag="rgb2gray"):
    """Convert an RGB image to its brightness, without channels.

    The type of the values is kept: images of integers are rounded.

    :param observation_space: Space of the image.
    :param rgb_dim: The dimension of the channels.
    :param num_flatten_dims: Ignored; accepted because existing configurations contain it.
    :raises ConfigError: The dimension does not hold three channels.
    """

    def __init__(self, observation_space: spaces.Box, rgb_dim: int = -1, num_flatten_dims: int | None = None) -> None:
        super().__init__(observation_space)
        space = box_of(observation_space, "Rgb2GrayPreProcessor")
        self.rgb_dim = checked_axis(rgb_dim, len(space.shape), "Rgb2GrayPreProcessor: `rgb_dim`")
        if space.shape[self.rgb_dim] != len(LUMA):
            raise ConfigError(
                f"Rgb2GrayPreProcessor: dimension `rgb_dim` ({rgb_dim}) must have three channels, found {space.shape}."
            )
        gray = same_box(space, (*space.shape[: self.rgb_dim], *space.shape[self.rgb_dim + 1 :]))
        self._convert_by(Gray(*image_values(gray), axis=self.rgb_dim), gray)


class TransposePreProcessor(ConvertingPreProcessor, tag="transpose"):
    """Reorder the dimensions of an array, for instance from height, width, channels to channels, height, width.

    >>> TransposePreProcessor(spaces.Box(0, 1, (96, 64, 3)), axes=[2, 0, 1]).processed_shape()
    (3, 96, 64)

    :param observation_space: Space of the observation.
    :param axes: For each dimension of the result, the dimension of the observation.
    :raises ConfigError: The axes are not a permutation of the observation's dimensions.
    """

    def __init__(self, observation_space: spaces.Box, axes: Sequence[int]) -> None:
        super().__init__(observation_space)
        shape = box_of(observation_space, "TransposePreProcessor").shape
        self.axes = tuple(checked_axis(axis, len(shape), "TransposePreProcessor: `axes`") for axis in axes)
        if sorted(self.axes) != list(range(len(shape))):
            raise ConfigError(
                f"TransposePreProcessor: `axes` must name each of {len(shape)} dimensions once, found {list(axes)}."
            )
        self._convert_by(Transpose(self.axes))


class UnSqueezePreProcessor(ConvertingPreProcessor, tag="unsqueeze"):
    """Insert a dimension of size one, for instance the channel that a convolution needs.

    >>> UnSqueezePreProcessor(spaces.Box(0, 1, (96, 64)), dim=-3).processed_shape()
    (1, 96, 64)

    :param observation_space: Space of the observation.
    :param dim: Position of the dimension in the result; negative ones count from its right end.
    :raises ConfigError: The observation is not a Box, or the result has no such dimension.
    """

    def __init__(self, observation_space: spaces.Box, dim: int) -> None:
        super().__init__(observation_space)
        shape = box_of(observation_space, "UnSqueezePreProcessor").shape
        self.dim = checked_axis(dim, len(shape) + 1, "UnSqueezePreProcessor: `dim`, counted with the new one,")
        self._convert_by(Reshape((*shape[: self.dim], 1, *shape[self.dim :])))
