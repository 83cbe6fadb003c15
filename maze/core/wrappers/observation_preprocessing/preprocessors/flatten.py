"""Documented path of a pre-processor that is defined in `base`."""

from maze.core.wrappers.observation_preprocessing.preprocessors.base import FlattenPreProcessor

__all__ = ["FlattenPreProcessor"]
