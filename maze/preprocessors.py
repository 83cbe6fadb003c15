"""Short paths of the built-in pre-processors, for configurations."""

from maze.core.wrappers.observation_preprocessing.preprocessors.base import PreProcessor
from maze.core.wrappers.observation_preprocessing.preprocessors.flatten import FlattenPreProcessor
from maze.core.wrappers.observation_preprocessing.preprocessors.one_hot import OneHotPreProcessor
from maze.core.wrappers.observation_preprocessing.preprocessors.resize_img import ResizeImgPreProcessor
from maze.core.wrappers.observation_preprocessing.preprocessors.rgb2gray import Rgb2GrayPreProcessor
from maze.core.wrappers.observation_preprocessing.preprocessors.transpose import TransposePreProcessor
from maze.core.wrappers.observation_preprocessing.preprocessors.unsqueeze import UnSqueezePreProcessor

__all__ = [
    "FlattenPreProcessor",
    "OneHotPreProcessor",
    "PreProcessor",
    "ResizeImgPreProcessor",
    "Rgb2GrayPreProcessor",
    "TransposePreProcessor",
    "UnSqueezePreProcessor",
]
