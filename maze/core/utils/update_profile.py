"""Where the time of an update goes."""

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
    COLLECTING: "acting, stepping environments, and joining what they tell, in this process",
    WAITING: "for worker processes and for the actors of a cluster",
    TRANSFER: "weights and rollouts between processes: sending, receiving, copying",
    LEARNING: "all the rest: values, losses, gradients, the optimizer",
}
"""The parts of an update, which do not overlap."""
N_FUNCTIONS = 25
_REMARKS = (
    "This was the first update, in which much is set up. Where a second one follows, it is measured instead.",
    "The update after this one shows the functions as well; none has come to its end.",
)
"""What the file lacks after the first and after the second update."""
PROFILE_FILE = "profile.txt"
"""Where the profile is, in the directory of a run."""

P = ParamSpec("P")
R = TypeVar("R")

_running: Parts | None = None


class Parts:
    """Seconds and calls of each part; of parts within another one, the inner one counts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(MEANINGS, 0.0)
        self.calls: Counter[str] = Counter()
        self.thread = threading.get_ident()
        self._open = [LEARNING]
        self._since = time.perf_counter()

    def enter(self, part: str) -> None:
        """A part begins, within the one before."""
        self._count()
        self.calls[part] += part != self._open[-1]
        self._open.append(part)

    def leave(self) -> None:
        """The latest part ends."""
        self._count()
        self._open.pop()

    def _count(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def timed(part: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Counts the time that a function takes to a part of the update; costs next to nothing while nobody profiles.

    :param part: One of `MEANINGS`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def counted(*args: P.args, **kwargs: P.kwargs) -> R:
            parts = _running
            if parts is None or parts.thread != threading.get_ident():  # others do it beside the update
                return function(*args, **kwargs)
            parts.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                parts.leave()

        return counted

    return decorate


class UpdateProfile:
    """Profiles two updates of a training: where the time of one goes, and which functions another one spends it in.

    These are the second and the third: in the first much is set up, so that it counts only until the second is over.
    Functions are looked at in an update of their own, because that makes it slower. Where the training ends before, the
    file says what is missing.

    :param file: Where it is written.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._n_updates = 0
        self._table = ""

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to profile."""
        return self._n_updates > len(_REMARKS)

    @contextmanager
    def one_update(self, number: int) -> Iterator[None]:
        """Context of an update.

        :param number: Which one of the training it is, from 1.
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
    global _running  # noqa: PLW0603  # what runs in this process is profiled, whoever calls it
    _running = parts = Parts()
    try:
        yield parts
    finally:
        _running = None
        parts.leave()


def _table(parts: Parts, number: int) -> str:
    total = sum(parts.seconds.values())
    lines = [f"Where the time of update {number} went, in the process that learns: {total * 1e3:,.1f} ms", ""]
    for part, meaning in MEANINGS.items():
        seconds, calls = parts.seconds[part], parts.calls[part]
        times = "" if part == LEARNING else f"{calls:,} times"
        lines.append(f"{part:<12}{seconds * 1e3:>12,.1f} ms{seconds / total:>7.1%}{times:>16}   {meaning}")
    return "\n".join(lines) + "\n"


def _functions(profile: cProfile.Profile, number: int) -> str:
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(N_FUNCTIONS)
    lines = [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]
    header = f"The functions that update {number} spent most time in (itself slower, because each call is watched)"
    return "\n".join([header, "", *lines]) + "\n"
