"""Console output of runs, which never ends one: a pipe may be closed, a disk may be full."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

STREAMS = ("stdout", "stderr")


class LastingStream:
    """Text stream that loses what its target does not take, and is otherwise that target.

    A disk may have room again, so every text is tried.

    :param target: The stream that is written to.
    """

    def __init__(self, target: TextIO) -> None:
        self._target = target

    def write(self, text: str) -> int:
        try:
            return self._target.write(text)
        except UnicodeEncodeError:
            encoding = self._target.encoding
            return self.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError, RuntimeError):  # full or broken; closed; a signal handler amid another write
            return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError, ValueError, RuntimeError):
            self._target.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def drop_buffered(self) -> None:
        """Forgets what could not be written: Python would try again, and fail, when the process ends."""
        try:
            self._target.flush()
        except OSError:
            with suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                descriptor = self._target.fileno()
                kept = os.dup(descriptor)
                os.dup2(nowhere.fileno(), descriptor)
                self._target.flush()
                os.dup2(kept, descriptor)
                os.close(kept)
        except ValueError:
            return  # closed


@contextmanager
def lasting_console() -> Iterator[None]:
    """Context in which `print`, logging and progress bars go on silently where the console takes nothing more."""
    previous = {name: getattr(sys, name) for name in STREAMS}
    streams = let_console_last()
    try:
        yield
    finally:
        for name, stream in streams.items():
            if getattr(sys, name) is stream:  # otherwise somebody else has replaced it since
                setattr(sys, name, previous[name])
            stream.drop_buffered()


class NoTerminal(LastingStream):
    """A stream that says that it is no terminal, so that nobody draws live lines on it."""

    def isatty(self) -> bool:
        return False


@contextmanager
def quiet_console() -> Iterator[None]:
    """Context in which nothing is printed but what goes to the error stream, and no live lines."""
    with _nowhere() as nowhere, redirect_stdout(LastingStream(nowhere)), redirect_stderr(NoTerminal(sys.stderr)):
        yield


def _nowhere() -> TextIO:
    """Stands for a stream that Python does not have, because its descriptor was closed."""
    return open(os.devnull, "w", encoding="utf-8")


def let_console_last() -> dict[str, LastingStream]:
    """Replaces the standard streams of this process, for processes that end with what they do.

    :return: The streams that have taken their place, by name; what lasts already stays.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # where one was closed, files would be printed into
        pass
    os.close(descriptor)
    replaced = {}
    for name in STREAMS:
        target = getattr(sys, name)
        if not isinstance(target, LastingStream):
            stream = LastingStream(target if target is not None else _nowhere())
            setattr(sys, name, stream)
            replaced[name] = stream
    return replaced


def progress_bar(**arguments: Any) -> Any:
    """A bar of tqdm without the thread that watches over bars: it would outlive them, and every fork after it.

    :param arguments: Those of `tqdm.tqdm`.
    """
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        monitor_interval = 0

    return Bar(**arguments)
