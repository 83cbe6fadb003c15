"""HTML report of a run."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from maze.report.page import (
    Chart,
    Page,
    RunData,
    Series,
    Tile,
    chart_of_statistic,
    charts_of_columns,
    code_list,
    column_of,
    details,
    fact_list,
    page_section,
    tiles,
)
from maze.report.progress import Progress, StatisticsOfPath

REPORT_FILE = "report.html"
RETURN = "BaseEnvEvents/reward"
KPI = "BaseEnvEvents/kpi"
RATE = "environment steps per second"
_KPIS, _DISTRIBUTIONS, _LEARNING = "Key performance indicators", "Actions and other distributions", "Learning"
_TIME, _EVENTS = "Throughput and time", "Events"
_SECTIONS = (_KPIS, _DISTRIBUTIONS, _LEARNING, _TIME, _EVENTS)


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


def run_page(facts: RunFacts, progress: Progress, state: str, written: datetime, error: str | None = None) -> Page:
    """Build the report of a run.

    :param facts: Facts about the run.
    :param progress: Its statistics.
    :param state: `running`, `ended`, `interrupted` or `failed`.
    :param written: Time that the page shows.
    :param error: Error of a failed run.
    """
    data = RunData.of(facts.name, progress)
    since = "" if facts.started is None else f"started {facts.started:%Y-%m-%d %H:%M:%S}, "
    return Page(
        title=facts.title,
        subtitle=facts.name,
        state=state,
        note=f"{since}written {written:%Y-%m-%d %H:%M:%S}",
        error=error,
        sections=[
            page_section("Summary", tiles(_tiles(progress)), facts=fact_list(facts.facts)),
            *_statistics(progress, data),
            *_about(facts),
        ],
        runs=[data],
    )


def _statistics(progress: Progress, data: RunData) -> Iterator[str]:
    """Yield the sections of statistics, without empty ones."""
    paths = list(progress.paths.values())
    yield page_section("Return of episodes", charts=chart_of_statistic(RETURN, paths, is_large=True))
    charts = [chart for chart in charts_of_columns(paths) if not (chart.name == RETURN and chart.is_spread)]
    yield from chart_sections([*_throughput(progress, data), *charts], learning_interfaces(paths))
    yield page_section("All statistics", '<div class="statistics-table"></div>')


def chart_sections(charts: Sequence[Chart], learning: Container[str]) -> Iterator[str]:
    """Yield charts in sections by subject.

    :param charts: The charts.
    :param learning: Interfaces of the events of the algorithm.
    """
    sections: dict[str, list[Chart]] = {title: [] for title in _SECTIONS}
    for chart in charts:
        interface, event = (*chart.name.split("/", 2), "")[:2]
        if f"{interface}/{event}" == KPI:
            sections[_KPIS].append(chart)
        elif chart.is_distribution:
            sections[_DISTRIBUTIONS].append(chart)
        elif event.startswith("time_") or chart.name == RATE:
            sections[_TIME].append(chart)
        else:
            sections[_LEARNING if interface in learning else _EVENTS].append(chart)
    yield from (page_section(title, charts=found) for title, found in sections.items() if found)


def _about(facts: RunFacts) -> Iterator[str]:
    settings = fact_list(facts.settings)
    if facts.config:
        settings += details("The whole configuration", facts.config)
    if settings:
        yield page_section("Settings", settings)
    if facts.commands:
        yield page_section("Commands", code_list(facts.commands))


def learning_interfaces(paths: Sequence[StatisticsOfPath]) -> set[str]:
    """Return the interfaces of events of the algorithm: those that evaluations do not fire."""
    interfaces = {each.path: {name.partition("/")[0] for name in each.columns} for each in paths}
    evaluated = interfaces.get("eval", set())
    marked = {
        name.partition("/")[0]
        for each in paths
        for name in each.columns
        if any(mark in name.split("/")[1:2][0] for mark in ("loss", "learning_rate", "time_") if "/" in name)
    }
    return marked | (set().union(*interfaces.values()) - evaluated if evaluated else set())


def _throughput(progress: Progress, data: RunData) -> list[Chart]:
    """Return the chart of environment steps per second between two log steps, evaluations included."""
    for statistics in sorted(progress.paths.values(), key=lambda each: each.path != "train"):
        steps, seconds = np.asarray(statistics.env_steps), np.asarray(statistics.seconds)
        if len(steps) > 1 and np.isfinite(steps).all() and steps[-1] > steps[0]:
            passed = np.diff(seconds)
            rate = np.where(passed > 0, np.diff(steps) / np.where(passed > 0, passed, 1.0), math.nan)
            data.add(statistics.path, RATE, np.concatenate([[math.nan], rate]))
            return [Chart(RATE, [Series(statistics.path, statistics.path, RATE)])]
    return []


def _tiles(progress: Progress) -> Iterator[Tile]:
    name = f"{RETURN}/mean"
    for path, label in (("eval", "evaluation"), ("train", "training")):
        values = column_of(progress.paths.get(path), name)
        if values.size:
            yield Tile(f"mean return, latest {label}", float(values[-1]))
            if path == "eval":
                yield Tile("highest evaluation", float(values.max()))
    last = [each for each in progress.paths.values() if len(each)]
    steps = [each.env_steps[-1] for each in last if not math.isnan(each.env_steps[-1])]
    if steps and max(steps) > 0:
        yield Tile("environment steps", max(steps))
    seconds = max((each.seconds[-1] for each in last), default=0.0)
    if seconds:
        yield Tile("time", seconds, unit="s")
        if steps and max(steps) > 0:
            yield Tile("environment steps/s", max(steps) / seconds)
