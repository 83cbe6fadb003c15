"""A time limit for a block of code."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import Any


class Timeout:
    """Raise `TimeoutError` when the `with` block takes too long.

    Built on `SIGALRM`: main thread of a Unix process only. Time limits may be nested; the first to expire applies.

    :param seconds: The limit; fractions are allowed, 0: no limit.
    :param error_message: Text of the error.
    :raises ValueError: The limit is negative.
    :raises RuntimeError: The block is entered in another thread, or on a system without `SIGALRM`.
    """

    def __init__(self, seconds: float = 1, error_message: str = "Timeout") -> None:
        if seconds < 0:
            raise ValueError(f"`seconds`: expected a number of at least 0, found {seconds}.")
        self.seconds = seconds
        self.error_message = error_message
        self._previous_handler: Any = None
        self._outer_remaining = 0.0
        self._timer_started = 0.0
        self._is_armed = False

    def handle_timeout(self, signum: int, frame: FrameType | None) -> None:
        """Raise the error in the block; the handler of the signal.

        The wake-up descriptor of the process receives a zero: the block is not in native code that does not return.
        """
        descriptor = signal.set_wakeup_fd(-1)
        if descriptor >= 0:
            os.write(descriptor, b"\0")
            signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        raise TimeoutError(self.error_message)

    def __enter__(self) -> Timeout:
        if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Timeout needs SIGALRM: use it in the main thread of a Unix process.")
        self._outer_remaining, _ = signal.getitimer(signal.ITIMER_REAL)
        # An outer limit that ends sooner stays in force, with its own message.
        self._is_armed = self.seconds > 0 and not 0 < self._outer_remaining <= self.seconds
        if self._is_armed:
            self._previous_handler = signal.signal(signal.SIGALRM, self.handle_timeout)
            self._timer_started = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if not self._is_armed:
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous_handler)
        if self._outer_remaining > 0:
            elapsed = time.monotonic() - self._timer_started
            signal.setitimer(signal.ITIMER_REAL, max(1e-6, self._outer_remaining - elapsed))
