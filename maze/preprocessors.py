"""Short paths of the built-in pre-processors, for configurations."""

from maze.core.wrappers.observation_preprocessing.preprocessors.base import (
    FlattenPreProcessor,
    OneHotPreProcessor,
    PreProcessor,
    ResizeImgPreProcessor,
    Rgb2GrayPreProcessor,
    TransposePreProcessor,
    UnSqueezePreProcessor,
)

__all__ = [
    "FlattenPreProcessor",
    "OneHotPreProcessor",
    "PreProcessor",
    "ResizeImgPreProcessor",
    "Rgb2GrayPreProcessor",
    "TransposePreProcessor",
    "UnSqueezePreProcessor",
]
