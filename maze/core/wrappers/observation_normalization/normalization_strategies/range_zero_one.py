"""Normalization to the range from zero to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.wrappers.observation_normalization.normalization_strategies.base import (
    ObservationNormalizationStrategy,
    StatisticsType,
    chunks,
)


class RangeZeroOneObservationNormalizationStrategy(ObservationNormalizationStrategy):
    """Maps the smallest value to zero and the largest to one.

    Statistics: ``min`` and ``max``. Entries that do not vary among the samples are only shifted.
    """

    _names = ("min", "max")

    def _prepare(self) -> None:
        assert self._statistics is not None
        self._range = self._statistics["max"] - self._statistics["min"]

    @override(ObservationNormalizationStrategy)
    def estimate_stats(self, observations: list[np.ndarray]) -> StatisticsType:
        smallest = [chunk.min(axis=self._axis, keepdims=True) for chunk in chunks(observations)]
        largest = [chunk.max(axis=self._axis, keepdims=True) for chunk in chunks(observations)]
        low, high = np.minimum.reduce(smallest), np.maximum.reduce(largest)
        high = np.where(high == low, low + 1.0, high)
        if self._axis is None:
            return {"min": low.reshape(()), "max": high.reshape(())}
        return {"min": low[0], "max": high[0]}

    @override(ObservationNormalizationStrategy)
    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        if "min" in stats and "max" in stats and not (np.asarray(stats["max"]) > np.asarray(stats["min"])).all():
            raise ConfigError(
                f"{type(self).__name__}: the statistic `max` must exceed `min`, got {stats['max']!r} and "
                f"{stats['min']!r}."
            )
        super().set_statistics(stats)
        self._prepare()

    @override(ObservationNormalizationStrategy)
    def normalize_value(self, value: np.ndarray) -> np.ndarray:
        assert self._statistics is not None
        normalized: np.ndarray = (value - self._statistics["min"]) / self._range
        return normalized
