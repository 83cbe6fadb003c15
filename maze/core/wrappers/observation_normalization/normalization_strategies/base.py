"""Normalization strategies, and files of their statistics."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from numbers import Number
from pathlib import Path
from typing import Any, ClassVar, Union

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.array_conversions import Normalize
from maze.core.utils.files import write_with_checksum
from maze.core.utils.safe_pickle import safe_load

StatisticsType = dict[str, np.ndarray]
"""Named numbers or arrays, such as mean and standard deviation of an observation."""

Axis = Union[int, Sequence[int], None]

_CHUNK_BYTES = 2**25
# How far normalized values may be off if statistics are rounded to float32.
_TOLERANCE = 1e-5

# Differences of numbers below it are far from the largest number of float32.
_FLOAT32_LIMIT = 1e30

_EXACT_IN_FLOAT32 = ("float16", "float32", "int8", "uint8", "int16", "uint16", "bool")


class ObservationNormalizationStrategy(ABC):
    """Normalize one observation with statistics that are set or estimated from samples.

    Subclasses read their statistics from `_statistics`, which holds them unconverted.

    :param observation_space: Space of the observation.
    :param clip_range: Smallest and largest normalized value; None in either place: no limit.
    :param axis: Axes of the stacked samples `[n_samples, *shape]` over which statistics are taken: 0 keeps apart all
        entries of the observation, `[0, 1, 2]` only the channels of images `(height, width, channels)`; None takes
        one statistic of everything.
    :raises ConfigError: The observation's space is not a `Box`.
    """

    # The statistics that the strategy needs; empty: any.
    _names: ClassVar[tuple[str, ...]] = ()

    def __init__(self, observation_space: spaces.Box, clip_range: tuple[Any, Any], axis: Axis) -> None:
        if not isinstance(observation_space, spaces.Box):
            raise ConfigError(f"{type(self).__name__}: expected a Box space, found {observation_space}.")
        self._observation_space = observation_space
        self._clip_min, self._clip_max = self._checked_clip_range(clip_range)
        self._axis = self._checked_axis(axis)
        self._statistics: StatisticsType | None = None
        # Differences of large numbers need the precision that the observation has.
        self._is_exact = np.dtype(observation_space.dtype).name in _EXACT_IN_FLOAT32
        self._dtype = np.dtype(np.float32 if self._is_exact else np.float64)

    @abstractmethod
    def estimate_stats(self, observations: list[np.ndarray]) -> StatisticsType:
        """Calculate statistics.

        Each sample has the shape `[*observation_space.shape]`.

        :param observations: Samples of the observation.
        """

    @abstractmethod
    def normalize_value(self, value: np.ndarray) -> np.ndarray:
        """Normalize an observation, without clipping.

        :param value: `[..., *observation_space.shape]`; the result has the same shape.
        """

    def normalize_and_process_value(self, value: np.ndarray) -> np.ndarray:
        """Normalize and clip an observation.

        :return: Array of float32.
        :param value: `[..., *observation_space.shape]`; the result has the same shape.
        """
        normalized = self.normalize_value(np.asarray(value, dtype=self._dtype))
        if self._clip_min is not None:
            normalized = np.maximum(normalized, self._clip_min)
        if self._clip_max is not None:
            normalized = np.minimum(normalized, self._clip_max)
        return np.asarray(normalized, dtype=np.float32)

    def normalized_space(self, space: Any = None) -> spaces.Box:
        """Return the space of the normalized observation; without statistics only the clip range bounds it.

        :param space: Space of the observation in another sub-step, of the same shape.
        """
        space = self._observation_space if space is None else space
        low = np.full(space.shape, -np.inf if self._clip_min is None else self._clip_min, dtype=np.float32)
        high = np.full(space.shape, np.inf if self._clip_max is None else self._clip_max, dtype=np.float32)
        if self.is_initialized():
            with np.errstate(all="ignore"):  # bounds may be infinite, or become so
                bounds = np.stack([self.normalize_and_process_value(bound) for bound in (space.low, space.high)])
            low = np.where(np.isnan(bounds).any(axis=0), low, bounds.min(axis=0))
            high = np.where(np.isnan(bounds).any(axis=0), high, bounds.max(axis=0))
        return spaces.Box(low, high, dtype=np.float32)

    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        """Set the statistics.

        :param stats: Numbers or arrays that fit the shape of the observation.
        :raises ConfigError: One is missing, or does not fit the observation.
        """
        self._statistics = self._checked_statistics(stats)

    def get_statistics(self) -> StatisticsType | None:
        """Return the statistics; `None`: there are none yet."""
        return self._statistics

    def is_initialized(self) -> bool:
        """Return whether there are statistics."""
        return self._statistics is not None

    def _without_samples(self, **statistics: np.ndarray) -> StatisticsType:
        """Drop the axis of the samples, with `axis=None` all axes."""
        return {name: each.reshape(()) if self._axis is None else each[0] for name, each in statistics.items()}

    def _checked_statistics(self, stats: Mapping[str, Any]) -> StatisticsType:
        missing = [name for name in self._names if name not in stats]
        if missing:
            raise ConfigError(f"{type(self).__name__}: the statistics lack {missing}; found {sorted(stats)}.")
        shape, checked = self._observation_space.shape, {}
        for name, value in stats.items():
            # Not rounded to the observation's type: time stamps would lose the digits in which they differ.
            statistic = checked[str(name)] = np.array(value)
            try:
                fits = statistic.dtype.kind in "biuf" and np.isfinite(np.broadcast_to(statistic, shape)).all()
            except ValueError:
                fits = False
            if not fits:
                raise ConfigError(
                    f"{type(self).__name__}: expected finite numbers of the shape {shape} as `{name}`, found {value!r}."
                )
        return checked

    def _checked_clip_range(self, clip_range: Any) -> tuple[Any, Any]:
        limits = tuple(clip_range) if clip_range is not None else (None, None)
        is_valid = len(limits) == 2 and all(limit is None or isinstance(limit, Number) for limit in limits)
        if not is_valid or (None not in limits and limits[0] > limits[1]):
            raise ConfigError(
                f"{type(self).__name__}: `clip_range` must be two ascending numbers or nulls, found {clip_range!r}."
            )
        # Arrays: NumPy compares them with small observations faster than numbers of its own.
        low, high = (None if limit is None else np.asarray(limit, dtype=np.float32) for limit in limits)
        return low, high

    def _checked_axis(self, axis: Any) -> tuple[int, ...] | None:
        if axis is None:
            return None
        n_dims = len(self._observation_space.shape) + 1
        axes = (axis,) if isinstance(axis, int) else tuple(axis)
        if not all(isinstance(one, int) and -n_dims <= one < n_dims for one in axes) or not {0, -n_dims} & {*axes}:
            raise ConfigError(
                f"{type(self).__name__}: `axis` must be null or axes of {n_dims} dimensions, with 0; found {axis!r}."
            )
        return tuple(sorted({one % n_dims for one in axes}))


class LinearNormalizationStrategy(ObservationNormalizationStrategy):
    """Subtract an offset and divide by a scale."""

    @abstractmethod
    def _offset_and_scale(self, statistics: StatisticsType) -> tuple[np.ndarray, np.ndarray]:
        """Return offset and scale, as float64.

        :param statistics: The statistics, as float64.
        """

    @override(ObservationNormalizationStrategy)
    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        statistics = self._checked_statistics(stats)
        offset, scale = self._offset_and_scale({k: v.astype(np.float64) for k, v in statistics.items()})
        if not (scale > 0).all():
            raise ConfigError(f"{type(self).__name__}: the scale must be positive, found {dict(stats)}.")
        self._statistics = statistics
        with np.errstate(all="ignore"):
            single: tuple[np.ndarray, np.ndarray] = offset.astype(np.float32), scale.astype(np.float32)
        suffices = (
            self._is_exact
            and (np.abs(single[0] - offset) <= _TOLERANCE * scale).all()
            and (np.abs(offset) + scale < _FLOAT32_LIMIT).all()
            and (single[1] >= np.finfo(np.float32).tiny).all()
        )
        self._offset, self._scale = single if suffices else (offset, scale)
        self._dtype = self._offset.dtype

    def conversion(self) -> Normalize:
        """Return the normalization, clipping included, as data for exported policies."""
        return Normalize(self._offset, self._scale, self._clip_min, self._clip_max)

    @override(ObservationNormalizationStrategy)
    def normalize_value(self, value: np.ndarray) -> np.ndarray:
        return np.asarray((value - self._offset) / self._scale)


def chunks(observations: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yield stacked samples, at most 32 MiB at a time.

    :param observations: Samples.
    :return: Arrays of float64, `[n, *shape]`.
    """
    size = max(1, _CHUNK_BYTES // max(1, 8 * np.asarray(observations[0]).size))
    for start in range(0, len(observations), size):
        yield np.stack([np.asarray(sample, dtype=np.float64) for sample in observations[start : start + size]])


# A deviation below this share of the mean is the noise of float32: the observation is constant.
_RESOLUTION = 1e-7


class MeanZeroStdOneObservationNormalizationStrategy(LinearNormalizationStrategy):
    """Subtract the mean and divide by the standard deviation.

    Statistics: `mean` and `std`. Entries that do not vary among the samples are only shifted.
    """

    _names = ("mean", "std")

    @override(ObservationNormalizationStrategy)
    def estimate_stats(self, observations: list[np.ndarray]) -> StatisticsType:
        n_values = len(observations) * np.asarray(observations[0]).size
        # The mean of differences to one of the samples: that of a constant is then the constant itself.
        first = next(chunks(observations)).min(axis=self._axis, keepdims=True)
        total = sum((chunk - first).sum(axis=self._axis, keepdims=True) for chunk in chunks(observations))
        n_averaged = n_values // np.size(total)
        mean = first + total / n_averaged
        squares = sum(np.square(chunk - mean).sum(axis=self._axis, keepdims=True) for chunk in chunks(observations))
        std = np.sqrt(squares / n_averaged)
        std = np.where(std <= _RESOLUTION * np.abs(mean), 1.0, std)
        return self._without_samples(mean=mean, std=std)

    @override(LinearNormalizationStrategy)
    def _offset_and_scale(self, statistics: StatisticsType) -> tuple[np.ndarray, np.ndarray]:
        return statistics["mean"], statistics["std"]


class RangeZeroOneObservationNormalizationStrategy(LinearNormalizationStrategy):
    """Map the smallest value to zero and the largest to one.

    Statistics: `min` and `max`. Entries that do not vary among the samples are only shifted.
    """

    _names = ("min", "max")

    @override(ObservationNormalizationStrategy)
    def estimate_stats(self, observations: list[np.ndarray]) -> StatisticsType:
        smallest = [chunk.min(axis=self._axis, keepdims=True) for chunk in chunks(observations)]
        largest = [chunk.max(axis=self._axis, keepdims=True) for chunk in chunks(observations)]
        low, high = np.minimum.reduce(smallest), np.maximum.reduce(largest)
        return self._without_samples(min=low, max=high)

    @override(LinearNormalizationStrategy)
    def _offset_and_scale(self, statistics: StatisticsType) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.broadcast_arrays(statistics["min"], statistics["max"])
        return low.copy(), np.where(high == low, 1.0, high - low)


StructuredStatisticsType = dict[str, StatisticsType]
"""The statistics of each normalized observation, by its name."""


def save_statistics(path: Path, statistics: StructuredStatisticsType) -> None:
    """Write statistics atomically.

    :param path: The file.
    :param statistics: Statistics by name of the observation.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    write_with_checksum(path, pickle.dumps(statistics, protocol=4))


def load_statistics(path: Path) -> StructuredStatisticsType:
    """Read statistics; no code in the file is executed.

    :param path: The file.
    :raises CheckpointError: There is no such file, or it does not hold statistics.
    """
    loaded = safe_load(path) if path.is_file() else None
    if not isinstance(loaded, Mapping) or not all(isinstance(entry, Mapping) for entry in loaded.values()):
        raise CheckpointError(
            f"`{path}` holds no normalization statistics: expected names and values by observation, found "
            f"{'no file' if loaded is None else type(loaded).__name__}. Training with `wrappers=vector_obs` writes it; "
            "in Python, `obtain_normalization_statistics(env, n_samples=...)` does."
        )
    return {str(name): dict(entry) for name, entry in loaded.items()}
