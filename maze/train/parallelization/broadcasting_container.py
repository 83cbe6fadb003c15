"""What a learner hands out to its workers: the newest policy and its version, and whether to stop."""

from __future__ import annotations

import threading
from multiprocessing.managers import BaseManager
from typing import Any


class BroadcastingContainer:
    """Holds the newest policy for all who ask; versions count from 0 (nothing was handed out yet).

    Safe to use from several threads. Other processes reach it through a :class:`BroadcastingManager`; the actors of
    this package get their weights through shared memory instead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop_flag = False
        self._version = 0
        self._state_dict: dict[str, Any] | None = None
        self._aux_data: dict[str, Any] | None = None

    def stop_flag(self) -> bool:
        """Whether the workers are to stop."""
        return self._stop_flag

    def set_stop_flag(self) -> None:
        """Tells the workers to stop."""
        self._stop_flag = True

    def policy_version(self) -> int:
        """Number of policies handed out so far."""
        return self._version

    def policy_state_dict(self) -> dict[str, Any]:
        """The newest policy; an empty dictionary if there is none."""
        with self._lock:
            return {} if self._state_dict is None else self._state_dict

    def set_policy_state_dict(self, state_dict: dict[str, Any], aux_data: dict[str, Any] | None = None) -> None:
        """Hands out a policy as the next version.

        :param state_dict: Its weights.
        :param aux_data: Whatever else belongs to it.
        """
        with self._lock:
            self._state_dict = state_dict
            self._aux_data = aux_data
            self._version += 1

    def aux_data(self) -> dict[str, Any] | None:
        """What else belongs to the newest policy."""
        with self._lock:
            return self._aux_data


class BroadcastingManager(BaseManager):
    """Serves a :class:`BroadcastingContainer` to other processes (`manager.BroadcastingContainer()`)."""


BroadcastingManager.register("BroadcastingContainer", BroadcastingContainer)
