"""Environments that can be put into the state of another one, for planning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SimulatedEnvMixin(ABC):
    """Environment that can take over the state of another instance of its kind."""

    @abstractmethod
    def clone_from(self, env: Any) -> None:
        """Takes over the state of `env`; afterwards both go on independently.

        :param env: Environment of the same type and configuration, wrapped in the same way.
        """

    def set_fast_step(self, do_fast_step: bool) -> None:
        """Asks the environment to leave out what simulated steps do not need (logging, costly observations).

        :param do_fast_step: Whether to leave it out. Environments without such parts ignore this.
        """
