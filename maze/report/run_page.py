"""HTML report of a run, and its writer."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from maze.console.runs import duration_text
from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, StatsContext
from maze.report import page
from maze.report.progress import Progress
from maze.train.utils.run_process import ENDED, INTERRUPTED, RUNNING, read_record

REPORT_FILE = "report.html"
RETURN = "BaseEnvEvents/reward"


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run other than its statistics.

    :param name: Name of the run, such as its directory.
    :param title: Environment and algorithm.
    :param started: Time of its start; `None`: unknown.
    :param facts: Further facts as text, by name.
    :param settings: Settings of the user: name and value.
    :param config: The whole configuration as YAML.
    :param commands: Commands for the run: a heading and the command.
    """

    name: str
    title: str
    started: datetime | None = None
    facts: Sequence[tuple[str, str]] = ()
    settings: Sequence[tuple[str, str]] = ()
    config: str = ""
    commands: Sequence[tuple[str, str]] = ()


def run_page(facts: RunFacts, progress: Progress, state: str, written: datetime, error: str | None = None) -> page.Page:
    """Build the report of a run.

    :param facts: Facts about the run.
    :param progress: Its statistics.
    :param state: `running`, `ended`, `interrupted` or `failed`.
    :param written: Time that the page shows.
    :param error: Error of a failed run.
    """
    paths = list(progress.paths.values())
    charts = [chart for chart in page.charts_of_columns(paths) if not (chart.name == RETURN and chart.is_spread)]
    config = page.details("The whole configuration", facts.config) if facts.config else ""
    since = "" if facts.started is None else f"started {facts.started:%Y-%m-%d %H:%M:%S}, "
    return page.Page(
        title=facts.title,
        subtitle=facts.name,
        state=state,
        note=f"{since}written {written:%Y-%m-%d %H:%M:%S}",
        error=error,
        sections=[
            page.page_section("Summary", page.tiles(_tiles(progress)), facts=page.fact_list(facts.facts)),
            page.page_section("Return of episodes", charts=page.chart_of_statistic(RETURN, paths, is_large=True)),
            *chart_sections(charts),
            page.page_section("All statistics", '<div class="statistics-table"></div>'),
            page.page_section("Settings", page.fact_list(facts.settings) + config),
            page.page_section("Commands", page.code_list(facts.commands)),
        ],
        runs=[page.RunData.of(facts.name, progress)],
    )


def chart_sections(charts: Sequence[page.Chart]) -> Iterator[str]:
    """Yield charts in sections by the interface of their events."""
    sections: dict[str, list[page.Chart]] = {}
    for chart in charts:
        sections.setdefault(chart.name.partition("/")[0], []).append(chart)
    yield from (page.page_section(title, charts=found) for title, found in sections.items())


def _tiles(progress: Progress) -> Iterator[page.Tile]:
    name = f"{RETURN}/mean"
    for path, label in (("eval", "evaluation"), ("train", "training")):
        values = page.column_of(progress.paths.get(path), name)
        if values.size:
            yield page.Tile(f"mean return, latest {label}", float(values[-1]))
            if path == "eval":
                yield page.Tile("highest evaluation", float(values.max()))
    last = [each for each in progress.paths.values() if len(each)]
    steps = [each.env_steps[-1] for each in last if not math.isnan(each.env_steps[-1])]
    if steps and max(steps) > 0:
        yield page.Tile("environment steps", max(steps))
    seconds = max((each.seconds[-1] for each in last), default=0.0)
    if seconds:
        yield page.Tile("time", seconds, duration_text(seconds))
        if steps and max(steps) > 0:
            yield page.Tile("environment steps/s", max(steps) / seconds)


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
        if error is None or isinstance(error, KeyboardInterrupt):
            self._guarded(lambda: self._write(ENDED if error is None else INTERRUPTED))
        else:
            self._guarded(lambda: self._write(FAILED, f"{type(error).__name__}: {error}"))

    def _add(self, path: str | None, step: int, stats: LogStats) -> None:
        if self._earlier is not None:
            self._start -= self.progress.take_over(self._earlier, step, path or "")
            self._earlier = None
        seconds = self._clock() - self._start
        self.progress.add(path, step, seconds, StatsContext.active().n_env_steps, stats)

    def _finish_step(self) -> None:
        self.progress.finish_step()
        record = read_record(self.directory)
        now, state = self._clock(), RUNNING if record is None else str(record.get("state"))
        if not self.progress.n_rows or (now < self._next_write and state != ENDED):
            return
        self._write(state)
        duration = self._clock() - now
        self._next_write = now + max(self._interval, duration / MOST_OF_THE_TIME)

    def _write(self, state: str, error: str | None = None) -> None:
        self.progress.finish_step()
        content = (self.progress.n_rows, state, error)
        if content == self._written or not self.progress.n_rows:
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
                "The report in %s is no longer written: %s: %s", self.directory, type(error).__name__, error
            )
