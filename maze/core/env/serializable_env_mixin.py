"""Interface to the components that are recorded with the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SerializableEnvMixin(ABC):
    """Environment with components whose state belongs to a recorded trajectory."""

    @abstractmethod
    def get_serializable_components(self) -> dict[str, Any]:
        """Return picklable components by name; empty if the state is complete."""
