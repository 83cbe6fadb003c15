"""The process of a run: its progress in a small file beside the checkpoint, an orderly end after SIGINT or SIGTERM, and
memory that is kept between minibatches.
"""

from __future__ import annotations

import contextvars
import ctypes
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

from maze.core.utils.files import read_json_object, write_whole

RECORD_FILE = "run.json"
"""File with the progress of a run, in its directory; it is read without torch and without checkpoints."""

RUNNING, ENDED, INTERRUPTED = "running", "ended", "interrupted"


class EpochSummary(NamedTuple):
    """Summary of an epoch."""

    epoch: int
    """Number of the epoch, counted from 1."""
    n_steps: int
    """Environment steps of the run so far, this epoch included; 0 where learning takes none."""
    mean_reward: float
    """Mean reward of the training episodes that ended in it; NaN: none did."""


def write_record(directory: Path, state: str, values: Mapping[str, Any]) -> None:
    """Write the progress of a run atomically; disk errors are ignored.

    :param directory: Directory of the run.
    :param state: `running`, `ended` or `interrupted`.
    :param values: Plain values.
    """
    text = json.dumps({"state": state, **values, "process": os.getpid(), "host": socket.gethostname()}, indent=2)
    with suppress(OSError):
        write_whole(directory / RECORD_FILE, f"{text}\n")


def read_record(directory: Path) -> dict[str, Any] | None:
    """Return the progress of a run; `None`: there is no record. A killed run is `interrupted`.

    :param directory: Directory of the run.
    """
    record = read_json_object(directory / RECORD_FILE)
    if not record:
        return None
    if record.get("state") == RUNNING and record.get("host") == socket.gethostname() and not _is_alive(record):
        record["state"] = INTERRUPTED
    return record


def _is_alive(record: Mapping[str, Any]) -> bool:
    process = record.get("process")
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True


T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> Future[T]:
    """Call a function in a thread, which logs to the statistics of this run.

    :param function: The function. It may hang: a daemon thread does not keep the process alive.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True).start()
    return future


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

    def __exit__(self, *exc_info: object) -> None:
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


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # as <malloc.h> numbers them
# Thresholds of glibc after large blocks were freed.
_DEFAULTS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26}
# Bytes: blocks up to a quarter of a GiB are used again, and up to one GiB is kept for them.
_KEPT = {_MMAP_THRESHOLD: 2**28, _TRIM_THRESHOLD: 2**30}


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Return a context in which the process does not give large freed memory back, and gives it back in the end.

    Large minibatches free and allocate the same dozens of megabytes again and again. The operating system, which gets
    them back each time otherwise, hands out empty pages one by one: with images, or many candidates, that took as long
    as the networks. Where the C library is not glibc, nothing is changed.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not (hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim")):
        yield
        return
    try:
        _set(libc, _KEPT)
        yield
    finally:
        _set(libc, _DEFAULTS)
        libc.malloc_trim(ctypes.c_size_t(0))


def _set(libc: ctypes.CDLL, options: dict[int, int]) -> None:
    for option, value in options.items():
        libc.mallopt(ctypes.c_int(option), ctypes.c_int(value))
