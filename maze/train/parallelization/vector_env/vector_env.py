"""Base of vector environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from maze.core.env.base_env import BaseEnv


class VectorEnv(BaseEnv, ABC):
    """Several environments that are stepped together.

    :param n_envs: Number of environments.
    """

    def __init__(self, n_envs: int) -> None:
        self.n_envs = n_envs

    @abstractmethod
    def step(  # type: ignore[override]
        self, actions: Any
    ) -> tuple[Any, np.ndarray, np.ndarray, Iterable[dict[Any, Any]]]:
        """Step all environments; environments whose episode ended are reset in the same call.

        Where resetting takes a call of its own, a subclass resets with the next step
        (:attr:`~maze.train.parallelization.vector_env.structured_vector_env.StructuredVectorEnv.autoreset_pending`).

        :param actions: Dictionary of arrays `[n_envs, ...]`.
        :return: Observations, rewards, dones (arrays `[n_envs, ...]`) and one info dictionary per environment.
        """

    @abstractmethod
    def reset(self) -> Any:
        """Reset all environments.

        :return: Observations `[n_envs, ...]`.
        """

    @abstractmethod
    def seed(self, seeds: Sequence[Any]) -> None:
        """Seed the environments.

        :param seeds: One seed per environment.
        """
