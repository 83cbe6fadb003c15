"""Flattening."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import Reshape
from maze.core.wrappers.observation_preprocessing.preprocessors.base import PreProcessor, box_of


class FlattenPreProcessor(PreProcessor):
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
        self._shape = (*kept, int(np.prod(space.shape[len(kept) :])))
        self._conversion = Reshape(self._shape)

    @override(PreProcessor)
    def processed_shape(self) -> tuple[int, ...]:
        return self._shape

    @override(PreProcessor)
    def processed_space(self) -> spaces.Box:
        space = self._original_observation_space
        return spaces.Box(space.low.reshape(self._shape), space.high.reshape(self._shape), dtype=space.dtype.type)

    @override(PreProcessor)
    def conversion(self) -> Reshape:
        return self._conversion

    @override(PreProcessor)
    def process(self, observation: np.ndarray) -> np.ndarray:
        return self._conversion(observation)
