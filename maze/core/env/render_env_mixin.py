"""Rendering interface of gym."""

from __future__ import annotations

from abc import ABC, abstractmethod


class RenderEnvMixin(ABC):
    """Environment that can draw its current state."""

    @abstractmethod
    def render(self, mode: str = "human") -> None:
        """Draw the current state.

        :param mode: `human` for a window.
        """
