"""Writer of the report of a running run."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, StatsContext
from maze.report.progress import Progress
from maze.report.run_page import REPORT_FILE, RunFacts, run_page
from maze.train.utils.training_record import ENDED, INTERRUPTED, RUNNING, read_record

_LOGGER = logging.getLogger(__name__)

INTERVAL = 10.0
"""Seconds between two writes."""
FAILED = "failed"
MOST_OF_THE_TIME = 0.01
"""Largest share of time for writing; the report is written less often if it takes longer."""


class ReportWriter(LogStatsWriter):
    """Write `progress.csv` and `report.html` into a run directory: after the first step, every ten seconds, at the end.

    An error is logged once, and the run continues without a report.

    :param directory: The run directory.
    :param facts: Facts about the run.
    :param earlier: Statistics of the resumed run; `None`: a new run.
    :param interval: Seconds between two writes.
    :param clock: Time in seconds, from any origin.
    """

    def __init__(
        self,
        directory: Path,
        facts: RunFacts,
        earlier: Progress | None = None,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory.absolute()
        self.facts = facts
        self.progress = Progress()
        self._interval = interval
        self._clock = clock
        self._earlier = earlier
        self._start = clock()
        self._next_write = self._start
        self._written: tuple[int, str, str | None] | None = None
        self._is_given_up = False

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        self._guarded(lambda: self._add(path, step, stats))

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        self._guarded(self._finish_step)

    @override(LogStatsWriter)
    def close(self) -> None:
        error = sys.exc_info()[1]  # writers are closed at the end of the run's context
        self._guarded(lambda: self._write_last(error))

    def _add(self, path: str | None, step: int, stats: LogStats) -> None:
        if self._earlier is not None:
            self._start -= self.progress.take_over(self._earlier, step, path or "")
            self._earlier = None
        seconds = self._clock() - self._start
        self.progress.add(path, step, seconds, StatsContext.active().n_env_steps, stats)

    def _finish_step(self) -> None:
        self.progress.finish_step()
        if self.progress.is_empty():
            return
        now, state = self._clock(), self._state()
        if now < self._next_write and state != ENDED:
            return
        self._write(state, None)
        duration = self._clock() - now
        self._next_write = now + max(self._interval, duration / MOST_OF_THE_TIME)

    def _write_last(self, error: BaseException | None) -> None:
        self.progress.finish_step()
        if self.progress.is_empty():
            return
        if error is None:
            self._write(ENDED, None)
        elif isinstance(error, KeyboardInterrupt):
            self._write(INTERRUPTED, None)
        else:
            self._write(FAILED, f"{type(error).__name__}: {error}")

    def _state(self) -> str:
        """Return the recorded state of the run."""
        record = read_record(self.directory)
        return RUNNING if record is None else str(record.get("state"))

    def _write(self, state: str, error: str | None) -> None:
        content = (self.progress.n_rows, state, error)
        if content == self._written:
            return
        self.progress.write(self.directory)
        run_page(self.facts, self.progress, state, datetime.now(), error).write(self.directory / REPORT_FILE)
        self._written = content

    def _guarded(self, act: Callable[[], Any]) -> None:
        if self._is_given_up:
            return
        try:
            act()
        except Exception as error:  # a report never ends a run
            self._is_given_up = True
            _LOGGER.warning(
                "The report in %s is not written any more: %s: %s", self.directory, type(error).__name__, error
            )
