"""Orderly end of a run after SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_Handler = Callable[[int, FrameType | None], Any] | int | None


class TrainingInterrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended a run after its current update; its state is saved.

    A `KeyboardInterrupt`, so that `except Exception` does not handle it as a failure.

    :param signum: The signal that was received.
    :param message: The saved files.
    """

    def __init__(self, signum: int, message: str = "") -> None:
        super().__init__(message or f"Interrupted by {signal.Signals(signum).name}.")
        self.signum = signum

    @property
    def exit_status(self) -> int:
        """The exit status a shell expects of a process ended by this signal: 130 (SIGINT) or 143 (SIGTERM)."""
        return 128 + self.signum


class InterruptGuard:
    """Context in which a first SIGINT or SIGTERM is only noted; a second SIGINT interrupts at once.

    The previous handlers come back when the context is left. Outside the main thread, where Python does not allow
    handlers, it does nothing.

    :param notify: Called once with the signal's name when the first one arrives.
    """

    def __init__(self, notify: Callable[[str], None] | None = None) -> None:
        self.signum: int | None = None
        self._notify = notify
        self._previous: dict[int, _Handler] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    @property
    def requested(self) -> bool:
        """Whether a signal has requested the end of the run."""
        return self.signum is not None

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if self.signum is None:
            self.signum = signum
            if self._notify is not None:
                self._notify(signal.Signals(signum).name)
