"""Access to the components that are recorded along with the state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SerializableEnvMixin(ABC):
    """Environment with components whose state matters for understanding a recorded trajectory."""

    @abstractmethod
    def get_serializable_components(self) -> dict[str, Any]:
        """Components by name, each of them picklable; empty if the state says everything."""
