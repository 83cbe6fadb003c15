"""Flattening."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import Reshape
from maze.core.wrappers.observation_preprocessing.preprocessors.base import ConvertingPreProcessor, box_of


class FlattenPreProcessor(ConvertingPreProcessor):
    """Joins the last dimensions of an array: `(..., a, b)` becomes `(..., a * b)`.

    >>> FlattenPreProcessor(spaces.Box(0, 1, (4, 3, 2)), num_flatten_dims=2).processed_shape()
    (4, 6)

    :param observation_space: Space of the observation.
    :param num_flatten_dims: How many dimensions are joined, counted from the last one.
    :raises ConfigError: The observation has fewer dimensions.
    """

    def __init__(self, observation_space: spaces.Box, num_flatten_dims: int) -> None:
        super().__init__(observation_space)
        space = box_of(observation_space, "FlattenPreProcessor")
        n_dims = len(space.shape)
        if isinstance(num_flatten_dims, bool) or not isinstance(num_flatten_dims, int):
            raise ConfigError(f"FlattenPreProcessor: `num_flatten_dims` must be an integer, got {num_flatten_dims!r}.")
        if not 1 <= num_flatten_dims <= n_dims:
            raise ConfigError(
                f"FlattenPreProcessor: `num_flatten_dims` must lie between 1 and the observation's {n_dims} dimensions "
                f"(shape {space.shape}), got {num_flatten_dims}."
            )
        kept = space.shape[: n_dims - num_flatten_dims]
        self._convert_by(Reshape((*kept, int(np.prod(space.shape[len(kept) :])))))
