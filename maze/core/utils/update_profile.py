"""Time profile of an update."""

from __future__ import annotations

import cProfile
import functools
import io
import pstats
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from typing_extensions import ParamSpec

from maze.core.utils.files import write_whole

COLLECTING, WAITING, TRANSFER, LEARNING = "collecting", "waiting", "transfer", "learning"
MEANINGS = {
    COLLECTING: "acting, stepping environments and joining their results, in this process",
    WAITING: "for worker processes and Ray actors",
    TRANSFER: "weights and rollouts between processes: sending, receiving, copying",
    LEARNING: "everything else: values, losses, gradients, the optimizer",
}
"""The parts of an update, which do not overlap."""
N_FUNCTIONS = 25
_REMARKS = (
    "This was the first update, which includes set-up. A second update is measured instead, if there is one.",
    "The next update adds the table of functions; none has been completed.",
)
"""Remarks on the file after the first and after the second update."""
PROFILE_FILE = "profile.txt"
"""Name of the profile in the run directory."""

P = ParamSpec("P")
R = TypeVar("R")

_running: Parts | None = None


class Parts:
    """Count seconds and calls of each part; nested parts count as the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(MEANINGS, 0.0)
        self.calls: Counter[str] = Counter()
        self.thread = threading.get_ident()
        self._open = [LEARNING]
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        """Begin a part within the current one."""
        self._count()
        self.calls[part] += part != self._open[-1]
        self._open.append(part)

    def leave(self) -> None:
        """End the current part."""
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def timed(part: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Attribute the time of a function to a part of the update; the cost is negligible without a profile.

    :param part: One of `MEANINGS`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            parts = _running
            if parts is None or parts.thread != threading.get_ident():  # not the thread of the update
                return function(*args, **kwargs)
            parts.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                parts.leave()

        return counted

    return decorate


class UpdateProfile:
    """Profile two updates of a run: the parts of the second one and the functions of the third one.

    The first update includes set-up and is replaced by the second one. Functions are profiled in a separate update,
    because the profiler slows it down. If the run ends earlier, the file states which part is missing.

    :param file: The file to write.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._n_updates = 0
        self._table = ""

    @property
    def is_done(self) -> bool:
        """Whether both updates have been profiled."""
        return self._n_updates > len(_REMARKS)

    @contextmanager
    def one_update(self, number: int) -> Iterator[None]:
        """Context of an update.

        :param number: Number of the update in the run, from 1.
        """
        self._n_updates += 1
        if self._n_updates <= len(_REMARKS):
            with _counted() as parts:
                yield
            self._table = _table(parts, number)
            write_whole(self._file, f"{self._table}\n{_REMARKS[self._n_updates - 1]}\n")
        else:
            profile = cProfile.Profile()
            with profile:
                yield
            write_whole(self._file, f"{self._table}\n{_functions(profile, number)}")


@contextmanager
def _counted() -> Iterator[Parts]:
    global _running  # noqa: PLW0603  # all code of this process is profiled
    _running = parts = Parts()
    try:
        yield parts
    finally:
        _running = None
        parts.leave()


def _table(parts: Parts, number: int) -> str:
    total = sum(parts.seconds.values())
    lines = [f"Time of update {number} in the learning process: {total * 1e3:,.1f} ms", ""]
    for part, meaning in MEANINGS.items():
        seconds, calls = parts.seconds[part], parts.calls[part]
        times = "" if part == LEARNING else f"{calls:,} times"
        lines.append(f"{part:<12}{seconds * 1e3:>12,.1f} ms{seconds / total:>7.1%}{times:>16}   {meaning}")
    return "\n".join(lines) + "\n"


def _functions(profile: cProfile.Profile, number: int) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(N_FUNCTIONS)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    header = f"The most expensive functions of update {number} (slower than others, because each call is profiled)"
    return "\n".join([header, "", *lines]) + "\n"
