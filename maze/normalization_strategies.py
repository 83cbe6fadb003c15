"""Short paths of the built-in normalization strategies, for configurations."""

from maze.core.wrappers.observation_normalization.normalization_strategies.base import (
    MeanZeroStdOneObservationNormalizationStrategy,
    ObservationNormalizationStrategy,
    RangeZeroOneObservationNormalizationStrategy,
)

__all__ = [
    "MeanZeroStdOneObservationNormalizationStrategy",
    "ObservationNormalizationStrategy",
    "RangeZeroOneObservationNormalizationStrategy",
]
