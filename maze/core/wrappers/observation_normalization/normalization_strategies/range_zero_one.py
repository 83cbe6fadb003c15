"""Documented path of a strategy that is defined in `base`."""

from maze.core.wrappers.observation_normalization.normalization_strategies.base import (
    RangeZeroOneObservationNormalizationStrategy,
)

__all__ = ["RangeZeroOneObservationNormalizationStrategy"]
