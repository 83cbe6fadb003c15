"""What a pre-processor is."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import ArrayConversion


class PreProcessor(ABC):
    """Converts one observation, and says how the converted one's space looks.

    The converted observation is called `<name>-<tag>`.

    :param observation_space: Space of the observation to convert.
    :param kwargs: Settings of the subclass, the `config` of its entry in the wrapper's configuration.
    """

    def __init__(self, observation_space: spaces.Space[Any], **kwargs: Any) -> None:
        self._original_observation_space: Any = observation_space

    @abstractmethod
    def processed_shape(self) -> tuple[int, ...]:
        """Shape of the converted observation."""

    @abstractmethod
    def processed_space(self) -> spaces.Space[Any]:
        """Space of the converted observation."""

    @abstractmethod
    def process(self, observation: np.ndarray) -> np.ndarray:
        """Converts an observation; the given array stays as it is.

        :param observation: `[*space.shape]` of the original space.
        """

    def conversion(self) -> ArrayConversion | None:
        """What :meth:`process` does as data, by which an exported policy does it too; None: only `process` knows."""
        return None

    def tag(self) -> str:
        """What is appended to the name of the observation: the name of the file that defines the class."""
        module = type(self).__module__
        return Path(inspect.getfile(type(self))).stem if module == "__main__" else module.rpartition(".")[2]


class ConvertingPreProcessor(PreProcessor):
    """A pre-processor that is all data: a conversion, and the space of what it gives."""

    def _convert_by(self, conversion: ArrayConversion, space: spaces.Box | None = None) -> None:
        """Comes last in a constructor.

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
    """The space itself, checked to be one of arrays.

    :param space: Space of an observation.
    :param processor: Who needs it, for the message.
    :raises ConfigError: It is none.
    """
    if not isinstance(space, spaces.Box):
        raise ConfigError(f"{processor}: expected an observation with a Box space, found {space}.")
    return space


def same_box(space: spaces.Box, shape: tuple[int, ...]) -> spaces.Box:
    """Box of another shape whose bounds, type and range of values are those of `space`, taken over all entries."""
    return spaces.Box(space.low.min(), space.high.max(), shape, dtype=space.dtype.type)


def image_values(space: spaces.Box) -> tuple[str, float, float]:
    """Type, smallest and largest value of an image."""
    return str(space.dtype), float(space.low.flat[0]), float(space.high.flat[0])


def checked_axis(axis: int, n_dims: int, what: str) -> int:
    """The same axis, counted from the left.

    :param axis: Axis; negative ones count from the right.
    :param n_dims: Number of dimensions.
    :param what: Who asks, for the message.
    :raises ConfigError: The observation has no such axis.
    """
    if type(axis) is not int or not -n_dims <= axis < n_dims:
        raise ConfigError(f"{what} must be an axis of the observation's {n_dims} dimensions, got {axis!r}.")
    return axis % n_dims
