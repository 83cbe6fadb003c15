"""Documented path of a pre-processor that is defined in `base`."""

from maze.core.wrappers.observation_preprocessing.preprocessors.base import Rgb2GrayPreProcessor

__all__ = ["Rgb2GrayPreProcessor"]
