"""Standard streams that never end a run: if stdout is closed or its disk is full, the run continues.

Processes that outlive a command and hold its pipes open are reported.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, TextIO

STREAMS = ("stdout", "stderr")
_SECONDS_TO_END = 1.0  # processes that were just ended may need a moment
_MARK = "MAZE_RUN_PROCESS"  # variable of the environment of started processes: the number of the process of the command


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


@contextmanager
def open_pipes_reported() -> Iterator[None]:
    """Return a context that reports processes that were started in it and still hold a pipe of the console open.

    A command in a pipeline, or one whose output is captured, appears to hang until these processes end. They are
    recognised by a variable of their environment. Only Linux lists the files of processes.
    """
    os.environ[_MARK] = str(os.getpid())
    yield
    mark, deadline = f"{_MARK}={os.environ.pop(_MARK)}".encode(), time.monotonic() + _SECONDS_TO_END
    while (remaining := _started_with_pipes(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if remaining:
        print(
            f"maze-run: {len(remaining)} processes that were started still run, such as {min(remaining)}. They keep "
            "the output of this command open, so that a pipe waits for them. End them in `close()` of the environment.",
            file=sys.stderr,
        )


def _started_with_pipes(mark: bytes) -> set[str]:
    """Describe the marked processes that share a pipe of stdout or stderr, except the helpers of Python."""
    own, found = _pipes(Path("/proc/self")), set()
    for process in Path("/proc").glob("[0-9]*") if own else ():
        with suppress(OSError):  # it has ended, or belongs to another user
            if own & _pipes(process) and mark in (process / "environ").read_bytes().split(b"\0"):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if "multiprocessing" not in command:  # a resource tracker ends with this process
                    found.add(f"{process.name} ({command:.100})")
    return found


def _pipes(process: Path) -> set[str]:
    found = set()
    for descriptor in ("1", "2"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            found.add(os.readlink(process / "fd" / descriptor))
    return {target for target in found if target.startswith("pipe:")}


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
