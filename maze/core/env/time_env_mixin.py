"""Environment time."""

from __future__ import annotations

from abc import ABC, abstractmethod


class TimeEnvMixin(ABC):
    """Environment with a time."""

    @abstractmethod
    def get_env_time(self) -> int:
        """Return the number of environment steps (not sub-steps) completed in the episode."""
