"""What a critic composer is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class CriticComposerInterface(ABC):
    """Builds a critic for the spaces of an environment."""

    @property
    @abstractmethod
    def critic(self) -> Any:
        """The critic (always the same object)."""
