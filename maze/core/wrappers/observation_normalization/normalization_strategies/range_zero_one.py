"""Normalization to the range from zero to one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.wrappers.observation_normalization.normalization_strategies.base import (
    LinearNormalizationStrategy,
    ObservationNormalizationStrategy,
    StatisticsType,
    chunks,
)


class RangeZeroOneObservationNormalizationStrategy(LinearNormalizationStrategy):
    """Maps the smallest value to zero and the largest to one.

    Statistics: `min` and `max`. Entries that do not vary among the samples are only shifted.
    """

    _names = ("min", "max")

    @override(ObservationNormalizationStrategy)
    def estimate_stats(self, observations: list[np.ndarray]) -> StatisticsType:
        smallest = [chunk.min(axis=self._axis, keepdims=True) for chunk in chunks(observations)]
        largest = [chunk.max(axis=self._axis, keepdims=True) for chunk in chunks(observations)]
        low, high = np.minimum.reduce(smallest), np.maximum.reduce(largest)
        if self._axis is None:
            return {"min": low.reshape(()), "max": high.reshape(())}
        return {"min": low[0], "max": high[0]}

    @override(ObservationNormalizationStrategy)
    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        if "min" in stats and "max" in stats and not (np.asarray(stats["max"]) >= np.asarray(stats["min"])).all():
            raise ConfigError(
                f"{type(self).__name__}: the statistic `max` must not be below `min`, got {stats['max']!r} and "
                f"{stats['min']!r}."
            )
        super().set_statistics(stats)

    @override(LinearNormalizationStrategy)
    def _offset_and_scale(self, statistics: StatisticsType) -> tuple[np.ndarray, np.ndarray]:
        low, high = np.broadcast_arrays(statistics["min"], statistics["max"])
        return low.copy(), np.where(high == low, 1.0, high - low)
