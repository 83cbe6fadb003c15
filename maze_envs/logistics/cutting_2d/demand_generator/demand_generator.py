"""The interface of demand generators."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from typing_extensions import Self

from maze_envs.logistics.cutting_2d.env.sizes import Size


class DemandGenerator(ABC):
    """State which piece is ordered in each step. Draw from a generator of its own."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def seed(self, seed: Any) -> None:
        """Restart the random generator."""
        self.rng = np.random.default_rng(seed)

    def copy(self) -> Self:
        """Return a generator with the same future orders; that of the current episode continues."""
        return copy.deepcopy(self)

    def new_future(self, seed: int) -> None:
        """Replace the future orders of the running episode, also those that are drawn in advance.

        :param seed: Generators in the same state draw the same orders with the same seed.
        """
        self.seed(seed)

    @abstractmethod
    def reset(self) -> None:
        """Begin a new episode."""

    @abstractmethod
    def next_order(self) -> Size:
        """Return the order of the coming step."""
