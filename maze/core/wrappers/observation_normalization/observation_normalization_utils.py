"""Documented path of functions that are defined in `observation_normalization_wrapper`."""

from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    estimate_observation_normalization_statistics,
    make_normalized_env_factory,
    obtain_normalization_statistics,
)

__all__ = [
    "estimate_observation_normalization_statistics",
    "make_normalized_env_factory",
    "obtain_normalization_statistics",
]
