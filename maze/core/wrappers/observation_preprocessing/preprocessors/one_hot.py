"""One-hot encoding."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.errors import ConfigError
from maze.core.utils.array_conversions import OneHot
from maze.core.wrappers.observation_preprocessing.preprocessors.base import ConvertingPreProcessor

_MAX_CATEGORIES = 2**16


class OneHotPreProcessor(ConvertingPreProcessor):
    """Encodes categories as vectors of zeros with a single one.

    Works for Discrete spaces, and for MultiDiscrete and bounded Box spaces of whole numbers (of any type), the vectors
    of whose entries are joined to one.

    >>> OneHotPreProcessor(spaces.Discrete(3)).process(np.int64(1))
    array([0., 1., 0.], dtype=float32)
    """

    def __init__(self, observation_space: spaces.Space[Any]) -> None:
        super().__init__(observation_space)
        conversion = OneHot(*_categories(observation_space))
        self._convert_by(conversion, spaces.Box(0.0, 1.0, (int(conversion.counts.sum()),), dtype=np.float32))


def _categories(space: spaces.Space[Any]) -> tuple[np.ndarray, np.ndarray]:
    """The smallest value and the number of values of each entry."""
    if isinstance(space, spaces.Discrete):
        return np.array([space.start], dtype=np.int64), np.array([space.n], dtype=np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start.reshape(-1).astype(np.int64), space.nvec.reshape(-1).astype(np.int64)
    if isinstance(space, spaces.Box) and np.isfinite([space.low, space.high]).all():
        bounds = np.stack([space.low, space.high]).reshape(2, -1)
        low, high = bounds.astype(object)
        counts = high - low + 1
        if (np.floor(bounds) == bounds).all() and counts.sum() <= _MAX_CATEGORIES:
            return low.astype(np.int64), counts.astype(np.int64)
    raise ConfigError(
        "OneHotPreProcessor: expected an observation of categories, with a Discrete, a MultiDiscrete, or a bounded "
        f"Box space of whole numbers with at most {_MAX_CATEGORIES} values in total, found {space}."
    )
