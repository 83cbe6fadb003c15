"""Interface of environments that can take over the state of another one, for planning."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class SimulatedEnvMixin(ABC):
    """Environment that can take over the state of another instance of its kind."""

    @abstractmethod
    def clone_from(self, env: Any) -> None:
        """Take over the state of `env`; afterwards both are independent.

        :param env: Environment of the same type and configuration, with the same wrappers.
        """

    def set_fast_step(self, do_fast_step: bool) -> None:
        """Leave out parts that simulated steps do not need (logging, costly observations).

        :param do_fast_step: Whether to leave them out. Environments without such parts ignore this.
        """
