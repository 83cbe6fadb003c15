"""Documented path of a pre-processor that is defined in `base`."""

from maze.core.wrappers.observation_preprocessing.preprocessors.base import TransposePreProcessor

__all__ = ["TransposePreProcessor"]
