"""Environment time."""

from __future__ import annotations

from abc import ABC, abstractmethod


class TimeEnvMixin(ABC):
    """Environment that knows its time."""

    @abstractmethod
    def get_env_time(self) -> int:
        """Time within the episode: the number of environment steps (not sub-steps) completed in it."""
