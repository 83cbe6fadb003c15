"""Time profile of an update."""

from __future__ import annotations

import functools
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
    """Profile the second update of a run; the first one, which includes set-up, only if the run ends with it.

    :param file: The file to write.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._n_updates = 0

    @property
    def is_done(self) -> bool:
        """Whether the second update has been profiled."""
        return self._n_updates > 1

    @contextmanager
    def one_update(self, number: int) -> Iterator[None]:
        """Return a context of an update.

        :param number: Number of the update in the run, from 1.
        """
        global _running  # noqa: PLW0603  # all code of this process is profiled
        self._n_updates += 1
        _running = parts = Parts()
        try:
            yield
        finally:
            _running = None
            parts.leave()
        total = sum(parts.seconds.values())
        lines = [f"Time of update {number} in the learning process: {total * 1e3:,.1f} ms", ""]
        for part, meaning in MEANINGS.items():
            seconds = parts.seconds[part]
            times = "" if part == LEARNING else f"{parts.calls[part]:,} times"
            lines.append(f"{part:<12}{seconds * 1e3:>12,.1f} ms{seconds / total:>7.1%}{times:>16}   {meaning}")
        if not self.is_done:
            lines += ["", "This was the first update, which includes set-up."]
        write_whole(self._file, "\n".join(lines) + "\n")
