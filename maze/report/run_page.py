"""HTML reports: of one run, with its writer; of several (seeds of an experiment, compared runs, trials of a sweep)."""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from maze.console.runs import duration_text
from maze.core.annotations import override
from maze.core.log_stats.log_stats import LogStats, LogStatsWriter, StatsContext
from maze.core.log_stats.log_stats_writer_tensorboard import flat_hyperparameters
from maze.core.utils.stats_utils import Estimate, iqm_interval, t_interval
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
    returns, charts = list[page.Chart](), list[page.Chart]()
    for chart in page.charts_of_columns(list(progress.paths.values())):
        (returns if chart.name == RETURN and chart.is_spread else charts).append(chart)
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
            page.page_section("Return of episodes", charts=[replace(chart, is_large=True) for chart in returns]),
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
        if (values := page.column_of(progress.paths.get(path), name)).size:
            yield page.Tile(f"mean return, latest {label}", float(values[-1]))
            if path == "eval":
                yield page.Tile("highest evaluation", float(values.max()))
    last = [each for each in progress.paths.values() if len(each)]
    steps = [each.env_steps[-1] for each in last if not math.isnan(each.env_steps[-1])]
    if steps and max(steps) > 0:
        yield page.Tile("environment steps", max(steps))
    if seconds := max((each.seconds[-1] for each in last), default=0.0):
        yield page.Tile("time", seconds, duration_text(seconds))
        if steps and max(steps) > 0:
            yield page.Tile("environment steps/s", max(steps) / seconds)


INTERVAL = 10.0
"""Seconds between two writes."""
FAILED = "failed"
MOST_OF_THE_TIME = 0.01
"""Largest share of time for writing; the report is written less often if it takes longer."""


class ReportWriter(LogStatsWriter):
    """Write `progress.csv` and `report.html` into a run directory: after the first step, every ten seconds, at the end.

    After an error, which is logged once, the run continues without a report.

    :param directory: The run directory.
    :param facts: Facts about the run.
    :param earlier: Statistics of the resumed run; `None`: a new run.
    :param interval: Seconds between two writes.
    :param clock: Time in seconds, from any origin.
    """

    failures = (Exception,)

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

    @override(LogStatsWriter)
    def write(self, path: str | None, step: int, stats: LogStats) -> None:
        if self._earlier is not None:
            self._start -= self.progress.take_over(self._earlier, step, path or "")
            self._earlier = None
        seconds = self._clock() - self._start
        self.progress.add(path, step, seconds, StatsContext.active().n_env_steps, stats)

    @override(LogStatsWriter)
    def on_log_step_increment(self) -> None:
        self.progress.finish_step()
        record = read_record(self.directory)
        now, state = self._clock(), RUNNING if record is None else str(record.get("state"))
        if not self.progress.n_rows or (now < self._next_write and state != ENDED):
            return
        self._write(state)
        duration = self._clock() - now
        self._next_write = now + max(self._interval, duration / MOST_OF_THE_TIME)

    @override(LogStatsWriter)
    def close(self) -> None:
        if StatsContext.active().is_disabled(self):
            return  # the report itself has failed, and the run continues
        error = StatsContext.active().error
        state = ENDED if error is None else INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
        self._write(state, f"{type(error).__name__}: {error}" if state == FAILED else None)

    def _write(self, state: str, error: str | None = None) -> None:
        self.progress.finish_step()
        content = (self.progress.n_rows, state, error)
        if content == self._written or not self.progress.n_rows:
            return
        self.progress.write(self.directory)
        run_page(self.facts, self.progress, state, datetime.now(), error).write(self.directory / REPORT_FILE)
        self._written = content


MOST_GROUPS = 10
"""Largest number of groups in a chart, which differ in colour."""
_N_POINTS = 300
_MOST_IN_A_LABEL = 3
_NO_SETTINGS = ("seeding.", "runner.")


@dataclass(frozen=True)
class ReportedRun:
    """A run to compare.

    :param facts: Facts about it.
    :param progress: Its statistics.
    :param config: Its configuration as plain containers.
    :param state: `running`, `ended`, `interrupted` or empty.
    """

    facts: RunFacts
    progress: Progress
    config: Mapping[str, Any]
    state: str = ""

    @cached_property
    def settings(self) -> dict[str, str]:
        """Hyperparameters by name, without seeds and runner."""
        flat = flat_hyperparameters(dict(self.config))
        return {name: str(value) for name, value in flat.items() if not name.startswith(_NO_SETTINGS)}

    @property
    def returns(self) -> np.ndarray[Any, Any]:
        """Mean returns of the evaluations; without evaluations, of the training episodes."""
        for path in ("eval", "train"):
            if (values := page.column_of(self.progress.paths.get(path), f"{RETURN}/mean")).size:
                return values
        return np.array([])


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seeds.

    :param label: Settings that differ from other groups.
    :param runs: The runs.
    """

    label: str
    runs: Sequence[ReportedRun]

    @property
    def final(self) -> np.ndarray[Any, Any]:
        """Latest mean return of each run that has one, `[n_runs]`."""
        return np.array([run.returns[-1] for run in self.runs if run.returns.size])

    @property
    def best(self) -> np.ndarray[Any, Any]:
        """Highest mean return of each run that has one, `[n_runs]`."""
        return np.array([run.returns.max() for run in self.runs if run.returns.size])


def grouped(runs: Sequence[ReportedRun]) -> list[RunGroup]:
    """Group runs with the same settings, in their order."""
    members: dict[tuple[tuple[str, str], ...], list[ReportedRun]] = {}
    for run in runs:
        members.setdefault(tuple(sorted(run.settings.items())), []).append(run)
    different = differing_settings(runs)
    labels = []
    for group in members.values():
        known = [f"{name.rpartition('.')[2]}={group[0].settings.get(name, '-')}" for name in different]
        few = 0 < len(known) <= _MOST_IN_A_LABEL
        labels.append(", ".join(known) if few else group[0].facts.title)
    if len(set(labels)) < len(labels):
        labels = [f"{label}: {group[0].facts.name}" for label, group in zip(labels, members.values(), strict=True)]
    return [RunGroup(label, group) for label, group in zip(labels, members.values(), strict=True)]


def differing_settings(runs: Sequence[ReportedRun]) -> list[str]:
    """Return the names of the settings in which runs differ."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({run.settings.get(name) for run in runs}) > 1]


def runs_page(
    runs: Sequence[ReportedRun], written: datetime, title: str = "", sections: Sequence[str] = ()
) -> page.Page:
    """Build the report of several runs; runs with the same settings are one group, with mean and interval.

    :param runs: The runs.
    :param written: Time that the page shows.
    :param title: Heading; empty: the titles of the runs.
    :param sections: Sections before the others.
    """
    groups = sorted(grouped(runs), key=lambda group: group.final.mean() if group.final.size else -np.inf, reverse=True)
    shown = groups[:MOST_GROUPS]
    data = [_curves(group) for group in shown]
    titles = list(dict.fromkeys(run.facts.title for run in runs))
    seeds = f"{len(runs)} seeds of one experiment" if len(groups) == 1 else f"{len(runs)} runs, {len(groups)} settings"
    return page.Page(
        title=title or " and ".join(titles[:3]),
        subtitle=seeds,
        note=f"written {written:%Y-%m-%d %H:%M:%S}; charts show the best {MOST_GROUPS} settings; lines are "
        "means, bands 95 % intervals of the mean (Student's t)",
        sections=[
            *sections,
            page.page_section("Results", _results(groups)),
            *_chart_sections(shown),
            page.page_section("Settings that differ", _settings(groups, differing_settings(runs))),
            page.page_section(
                "Runs", page.table(("run", "settings", "state", "latest return", "highest"), _run_rows(groups))
            ),
        ],
        runs=data,
    )


def _results(groups: Sequence[RunGroup]) -> str:
    rows: list[list[page.Cell]] = []
    for group in groups:
        final, returns = group.final, list[page.Cell]([None] * 3)
        if final.size:
            of_final = _estimate_text(Estimate.of(iqm_interval(final[np.newaxis])))
            returns = [float(final.mean()), of_final, float(group.best.mean())]
        steps = [max(each.env_steps, default=np.nan) for run in group.runs for each in run.progress.paths.values()]
        known = [value for value in steps if np.isfinite(value)]
        rows.append([group.label, float(len(group.runs)), *returns, float(max(known)) if known else None])
    header = ("settings", "runs", "latest return", "interquartile mean [95 %]", "highest return", "environment steps")
    return page.table(header, rows, "Means over runs; the interval is Student's t of the trimmed mean")


def _estimate_text(estimate: Estimate) -> str:
    if not estimate.is_known:
        return page.number_text(estimate.value)
    return f"{page.number_text(estimate.value)} [{page.number_text(estimate.low)}, {page.number_text(estimate.high)}]"


def _settings(groups: Sequence[RunGroup], names: Sequence[str]) -> str:
    if not names:
        return page.fact_list([("all settings", "equal except for seeds")])
    rows = [[group.label, *(group.runs[0].settings.get(name, "-") for name in names)] for group in groups]
    return page.table(("run", *names), rows, "Settings that differ between the runs")


def _run_rows(groups: Sequence[RunGroup]) -> Iterator[list[page.Cell]]:
    for group in groups:
        for run in group.runs:
            returns = run.returns
            last = (float(returns[-1]), float(returns.max())) if returns.size else (None, None)
            yield [run.facts.name, group.label, run.state, *last]


def _chart_sections(groups: Sequence[RunGroup]) -> Iterator[str]:
    """Yield a chart for each statistic and prefix, with a line for each group."""
    charts: dict[tuple[str, str], list[page.Series]] = {}
    for index, group in enumerate(groups):
        for chart in page.charts_of_columns(list(group.runs[0].progress.paths.values())):
            for series in chart.series if not chart.is_distribution else ():
                name = series.column
                low, high = (f"{name} low", f"{name} high") if len(group.runs) > 1 else (None, None)
                line = page.Series(group.label, series.path, name, None, low, high, run=index, colour=index)
                charts.setdefault((chart.name, series.path), []).append(line)
    ordered = sorted(charts.items(), key=lambda item: item[0][1] != "eval")
    large = [item for item in ordered if item[0][0] == RETURN]
    yield page.page_section(
        "Return of episodes",
        charts=[page.Chart(f"{name} ({path})", lines, is_large=True) for (name, path), lines in large],
    )
    rest = [page.Chart(f"{name} ({path})", lines) for (name, path), lines in ordered if name != RETURN]
    yield from chart_sections(rest)


def _curves(group: RunGroup) -> page.RunData:
    """Return mean and interval of each statistic over the runs of a group, at log steps that all of them have."""
    data = page.RunData(group.label)
    for path in group.runs[0].progress.paths:
        members = [run.progress.paths[path] for run in group.runs if path in run.progress.paths]
        places = [{step: index for index, step in enumerate(each.steps)} for each in members]
        if not (steps := sorted(set(places[0]).intersection(*places[1:]))):
            continue
        kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _N_POINTS)).round().astype(int)).tolist()
        rows = [[place[steps[number]] for number in kept] for place in places]
        axes = {
            name: np.stack(
                [np.asarray(getattr(each, axis))[index] for each, index in zip(members, rows, strict=True)]
            ).mean(0)
            for name, axis in (("step", "steps"), ("seconds", "seconds"), ("env_steps", "env_steps"))
        }
        columns: dict[str, np.ndarray[Any, Any]] = {}
        for name in members[0].columns:
            if all(name in each.columns for each in members):
                values = [np.asarray(each.columns[name])[index] for each, index in zip(members, rows, strict=True)]
                columns[name], low, high = t_interval(np.stack(values), axis=0)
                if len(members) > 1:
                    columns[f"{name} low"], columns[f"{name} high"] = low, high
        data.add_path(path, axes, columns)
    return data


RESULTS_FILE = "results.csv"
"""Table of the trials of a sweep, the best one first."""


def trials_section(directory: Path) -> tuple[str, set[str]] | None:
    """Return the section with the table of a sweep's trials, and the names of their runs, which replace repeated ones.

    :return: `None`: the directory has no results of a sweep.
    """
    try:
        header, *rows = csv.reader(io.StringIO((directory / RESULTS_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, csv.Error):
        return None
    rows = [row for row in rows if len(row) == len(header)]
    names = {name for row in rows for name in dict(zip(header, row, strict=True)).get("run_dir", "").split()}
    filled = [index for index in range(len(header)) if any(row[index] for row in rows)]
    cells = [[_typed(row[index]) for index in filled] for row in rows]
    return page.page_section("Trials", page.table([header[index] for index in filled], cells)), names


def _typed(text: str) -> str | float:
    try:
        number = float(text)
    except ValueError:
        return text
    return number if np.isfinite(number) else text
