"""Action and observation spaces of structured environments."""

from __future__ import annotations

from abc import ABC, abstractmethod

from gymnasium import spaces

from maze.core.env.structured_env import StepKeyType


class StructuredEnvSpacesMixin(ABC):
    """Spaces of a :class:`~maze.core.env.structured_env.StructuredEnv`."""

    @property
    @abstractmethod
    def action_space(self) -> spaces.Dict:
        """Action space of the actor that acts next."""

    @property
    @abstractmethod
    def observation_space(self) -> spaces.Dict:
        """Observation space of the actor that acts next."""

    @property
    @abstractmethod
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        """Action space of each sub-step."""

    @property
    @abstractmethod
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        """Observation space of each sub-step."""
