"""Standard streams that never end a run: if stdout is closed or its disk is full, the run continues."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

STREAMS = ("stdout", "stderr")


class LastingStream:
    """Text stream that drops what its target does not accept, and otherwise behaves as the target.

    Each text is tried, because a full disk may have space again.

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
        """Drop text that could not be written; Python would write it again, and fail, when the process ends."""
        try:
            self._target.flush()
        except OSError:
            with suppress(OSError, ValueError), descriptor_silenced(self._target.fileno()):
                self._target.flush()
        except ValueError:
            return  # closed


@contextmanager
def descriptor_silenced(descriptor: int) -> Iterator[None]:
    """Return a context in which the output of a file descriptor is dropped, also that of native libraries.

    :param descriptor: 1 is stdout, 2 is stderr; for all threads.
    """
    kept = os.dup(descriptor)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


@contextmanager
def lasting_console() -> Iterator[None]:
    """Return a context in which `print`, logging and progress bars raise no error if the console is closed."""
    previous = {name: getattr(sys, name) for name in STREAMS}
    streams = let_console_last()
    try:
        yield
    finally:
        for name, stream in streams.items():
            if getattr(sys, name) is stream:  # other code may have replaced it since
                setattr(sys, name, previous[name])
            stream.drop_buffered()


class NoTerminal(LastingStream):
    """Stream that is not reported as a terminal, so that no live line is drawn on it."""

    def isatty(self) -> bool:
        return False


@contextmanager
def quiet_console() -> Iterator[None]:
    """Return a context without output on stdout and without live lines; errors still go to stderr."""
    with _nowhere() as nowhere, redirect_stdout(LastingStream(nowhere)), redirect_stderr(NoTerminal(sys.stderr)):
        yield


def _nowhere() -> TextIO:
    """Stand in for a standard stream that is missing because its descriptor was closed."""
    return open(os.devnull, "w", encoding="utf-8")


def let_console_last() -> dict[str, LastingStream]:
    """Replace the standard streams of this process by lasting ones, for the rest of the process.

    :return: The streams that were installed, by name; streams that last already stay.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:  # otherwise a file that is opened next is printed into
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


def print_text(text: str) -> None:
    """Print a text; the run continues if stdout does not accept it.

    Characters that are missing in the console's encoding become question marks.
    """
    if sys.stdout is not None:
        print(text, file=LastingStream(sys.stdout), flush=True)
