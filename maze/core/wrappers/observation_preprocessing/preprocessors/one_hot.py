"""One-hot encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.wrappers.observation_preprocessing.preprocessors.base import PreProcessor

_MAX_CATEGORIES = 2**16


class OneHotPreProcessor(PreProcessor):
    """Encodes categories as vectors of zeros with a single one.

    Works for Discrete spaces, and for MultiDiscrete and bounded integer Box spaces, whose entries' vectors are joined
    to one.

    >>> OneHotPreProcessor(spaces.Discrete(3)).process(np.int64(1))
    array([0., 1., 0.], dtype=float32)

    :param observation_space: Space of the observation.
    """

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space)
        self._first, self._counts = _categories(observation_space)
        self._offsets = np.cumsum(self._counts) - self._counts
        self._shape = (int(self._counts.sum()),)

    @override(PreProcessor)
    def processed_shape(self) -> tuple[int, ...]:
        return self._shape

    @override(PreProcessor)
    def processed_space(self) -> spaces.Box:
        return spaces.Box(0.0, 1.0, self._shape, dtype=np.float32)

    @override(PreProcessor)
    def process(self, observation: np.ndarray) -> np.ndarray:
        category = np.asarray(observation).reshape(-1).astype(np.int64) - self._first
        if ((category < 0) | (category >= self._counts)).any():
            raise EnvironmentContractError(
                f"OneHotPreProcessor: the observation {observation!r} lies outside its space "
                f"{self._original_observation_space}."
            )
        encoded = np.zeros(self._shape, dtype=np.float32)
        encoded[self._offsets + category] = 1.0
        return encoded


def _categories(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest value and the number of values of each entry."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.start], dtype=np.int64), np.array([space.n], dtype=np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.reshape(-1).astype(np.int64), space.nvec.reshape(-1).astype(np.int64)
    if isinstance(space, spaces.Box) and np.dtype(space.dtype).kind in "iu":
        first = space.low.reshape(-1).astype(object)
        counts = space.high.reshape(-1).astype(object) - first + 1
        if counts.sum() <= _MAX_CATEGORIES:
            return first.astype(np.int64), counts.astype(np.int64)
    raise ConfigError(
        "OneHotPreProcessor: expected an observation of categories, with a Discrete, a MultiDiscrete, or a bounded "
        f"integer Box space with at most {_MAX_CATEGORIES} values in total, found {space}."
    )
