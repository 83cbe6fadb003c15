"""Interface of environments that can take over the state of another one, for planning."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from typing import Any, Literal

from maze.core.errors import ConfigError

Future = Literal["same", "new"]
"""Whether a copy has the random numbers of the original (`same`), or other ones (`new`)."""


class SimulatedEnvMixin(ABC):
    """Environment that can take over the state of another instance of its kind."""

    @abstractmethod
    def clone_from(self, env: Any, future: Future = "same") -> None:
        """Take over the state of `env`; afterwards both continue independently.

        :param env: Environment of the same type and configuration, wrapped in the same way.
        :param future: `same`: random generators are copied, so that the same actions have the same results in both, as
            replay requires. `new`: the copy gets other random numbers, as planning requires.
        """

    @abstractmethod
    def new_future(self, seed: int) -> None:
        """Replace the random numbers of the running episode; the state stays.

        :param seed: Seed of the new numbers; equal states, seeds and actions have equal results.
        """

    def renew_future(self, future: Future) -> None:
        """Complete :meth:`clone_from`: draw a new future if requested.

        :param future: `same` or `new`.
        :raises ConfigError: `future` has another value.
        """
        if future not in ("same", "new"):
            raise ConfigError(f"clone_from: `future` must be 'same' or 'new', found {future!r}.")
        if future == "new":
            self.new_future(secrets.randbits(63))

    def set_fast_step(self, do_fast_step: bool) -> None:
        """Leave out parts that simulated steps do not need (logging, costly observations).

        :param do_fast_step: Whether to leave them out. Environments without such parts ignore this.
        """
