"""Interface of critic composers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CriticComposerInterface(ABC):
    """Build a critic for the spaces of an environment."""

    @property
    @abstractmethod
    def critic(self) -> Any:
        """The critic (always the same object)."""
