"""Interface of critic composers."""

from __future__ import annotations

from abc import ABC
from typing import Any


class CriticComposerInterface(ABC):
    """Build a critic for the spaces of an environment. A derived class sets `_critic`, or overrides `critic`."""

    _critic: Any

    @property
    def critic(self) -> Any:
        """The critic (always the same object)."""
        return self._critic
