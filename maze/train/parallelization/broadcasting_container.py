"""Container for the newest policy of a learner, its version and a stop flag, for workers."""

from __future__ import annotations

import threading
from multiprocessing.managers import BaseManager
from typing import Any


class BroadcastingContainer:
    """Hold the newest policy; its version is 0 before the first one is set.

    Thread-safe. Other processes access it through a :class:`BroadcastingManager`; the actors of this package receive
    their weights through shared memory instead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_flag = False
        self._version = 0
        self._state_dict: dict[str, Any] | None = None
        self._aux_data: dict[str, Any] | None = None

    def stop_flag(self) -> bool:
        """Return whether the workers have to stop."""
        return self._stop_flag

    def set_stop_flag(self) -> None:
        """Set the stop flag."""
        self._stop_flag = True

    def policy_version(self) -> int:
        """Return the number of policies that were set so far."""
        return self._version

    def policy_state_dict(self) -> dict[str, Any]:
        """Return the newest policy; an empty dictionary if there is none."""
        with self._lock:
            return {} if self._state_dict is None else self._state_dict

    def set_policy_state_dict(self, state_dict: dict[str, Any], aux_data: dict[str, Any] | None = None) -> None:
        """Set a policy as the next version.

        :param state_dict: Its weights.
        :param aux_data: Further data of the policy.
        """
        with self._lock:
            self._state_dict = state_dict
            self._aux_data = aux_data
            self._version += 1

    def aux_data(self) -> dict[str, Any] | None:
        """Return the further data of the newest policy."""
        with self._lock:
            return self._aux_data


class BroadcastingManager(BaseManager):
    """Manager that shares a :class:`BroadcastingContainer` with other processes (`manager.BroadcastingContainer()`)."""


BroadcastingManager.register("BroadcastingContainer", BroadcastingContainer)
