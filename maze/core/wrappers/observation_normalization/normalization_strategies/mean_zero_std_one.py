"""Normalization to mean zero and standard deviation one."""

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

_RESOLUTION = 1e-7
"""A deviation below this share of the mean is the noise of float32: the observation is constant."""


class MeanZeroStdOneObservationNormalizationStrategy(LinearNormalizationStrategy):
    """Subtracts the mean and divides by the standard deviation.

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
        if self._axis is None:
            return {"mean": mean.reshape(()), "std": std.reshape(())}
        return {"mean": mean[0], "std": std[0]}

    @override(ObservationNormalizationStrategy)
    def set_statistics(self, stats: Mapping[str, Any]) -> None:
        if "std" in stats and not (np.asarray(stats["std"]) > 0).all():
            raise ConfigError(f"{type(self).__name__}: the statistic `std` must be positive, got {stats['std']!r}.")
        super().set_statistics(stats)

    @override(LinearNormalizationStrategy)
    def _offset_and_scale(self, statistics: StatisticsType) -> tuple[np.ndarray, np.ndarray]:
        return statistics["mean"], statistics["std"]
