"""The page about one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from maze.report.charts import Chart, Series, chart_of_statistic, charts_of_columns, column_of
from maze.report.page import (
    Page,
    RunData,
    Tile,
    code_list,
    details,
    embedded_page,
    embedded_picture,
    fact_list,
    page_section,
    tiles,
)
from maze.report.progress import Progress, StatisticsOfPath

REPORT_FILE = "report.html"
RETURN = ("BaseEnvEvents", "reward")
_KPI = ("BaseEnvEvents", "kpi")
_NO_ORDER = "events"


@dataclass(frozen=True)
class RunFacts:
    """What is known about a run besides its statistics.

    :param name: What the run is called, such as its directory.
    :param title: What was done in few words: environment and algorithm.
    :param started: When it began; `None`: nobody knows.
    :param facts: Further facts in words, by what they are about.
    :param settings: Settings that somebody chose: name, value, and the value otherwise (`None`: not known).
    :param config: The whole configuration as YAML.
    :param commands: What can be done with the run: a heading and the command.
    :param pictures: Pictures of the model, as SVG files, by name.
    :param episode: A recorded episode as an HTML page of its own.
    """

    name: str
    title: str
    started: datetime | None = None
    facts: Sequence[tuple[str, str]] = ()
    settings: Sequence[tuple[str, str, str | None]] = ()
    config: str = ""
    commands: Sequence[tuple[str, str]] = ()
    pictures: Sequence[tuple[str, str]] = ()
    episode: str | None = None


def run_page(facts: RunFacts, progress: Progress, state: str, written: datetime, error: str | None = None) -> Page:
    """The page about a run.

    :param facts: What is known about it.
    :param progress: Its statistics.
    :param state: `running`, `ended`, `interrupted` or `failed`.
    :param written: The time that the page shows.
    :param error: What the run failed with.
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
    """The sections that show statistics, each where there is something to show."""
    groups: dict[str, list[Chart]] = {name: [] for name in ("kpi", "action", "learning", "time", _NO_ORDER)}
    paths = list(progress.paths.values())
    yield page_section("Return of episodes", charts=chart_of_statistic("/".join(RETURN), paths, is_large=True))
    for chart in charts_of_columns(paths):
        interface, event = (*chart.name.split("/", 2), "")[:2]
        if (interface, event) == RETURN and chart.is_spread:
            continue
        if (interface, event) == _KPI:
            groups["kpi"].append(chart)
        elif chart.is_distribution:
            groups["action"].append(chart)
        elif event.startswith("time_"):
            groups["time"].append(chart)
        elif _is_about_learning(interface, paths):
            groups["learning"].append(chart)
        else:
            groups[_NO_ORDER].append(chart)
    groups["time"] = [*_throughput(progress, data), *groups["time"]]
    titles = {
        "kpi": "Key performance indicators",
        "action": "Actions and other distributions",
        "learning": "Learning",
        "time": "Throughput and time",
        _NO_ORDER: "Events",
    }
    for name, title in titles.items():
        if groups[name]:
            yield page_section(title, charts=groups[name])
    yield page_section("All statistics", '<div class="statistics-table"></div>')


def _about(facts: RunFacts) -> Iterator[str]:
    if facts.episode is not None:
        yield page_section("An episode of the best policy", embedded_page("Episode", facts.episode))
    if facts.pictures:
        yield page_section("Model", "".join(embedded_picture(name, svg) for name, svg in facts.pictures))
    settings = ""
    if facts.settings:
        rows = [
            (key, value if other is None else f"{value} (otherwise {other})") for key, value, other in facts.settings
        ]
        settings = fact_list(rows)
    if facts.config:
        settings += details("The whole configuration", facts.config)
    if settings:
        yield page_section("Settings", settings)
    if facts.commands:
        yield page_section("Going on", code_list(facts.commands))


def _is_about_learning(interface: str, paths: Sequence[StatisticsOfPath]) -> bool:
    """Whether events come from the algorithm rather than from the environment, which is evaluated as well."""
    with_it = [each.path for each in paths if any(name.startswith(f"{interface}/") for name in each.columns)]
    if "eval" not in with_it and any(each.path == "eval" for each in paths):
        return True
    marks = ("loss", "learning_rate", "time_")
    names = [name for each in paths for name in each.columns if name.startswith(f"{interface}/")]
    return any(mark in name.split("/", 2)[1] for name in names for mark in marks)


def _throughput(progress: Progress, data: RunData) -> list[Chart]:
    """Environment steps per second between two log steps, evaluations included."""
    for statistics in sorted(progress.paths.values(), key=lambda each: each.path != "train"):
        steps, seconds = np.asarray(statistics.env_steps), np.asarray(statistics.seconds)
        if len(steps) > 1 and np.isfinite(steps).all() and steps[-1] > steps[0]:
            passed = np.diff(seconds)
            rate = np.where(passed > 0, np.diff(steps) / np.where(passed > 0, passed, 1.0), math.nan)
            name = "environment steps per second"
            data.add(statistics.path, name, np.concatenate([[math.nan], rate]))
            return [Chart(name, [Series(statistics.path, statistics.path, name)])]
    return []


def _tiles(progress: Progress) -> Iterator[Tile]:
    name = "/".join((*RETURN, "mean"))
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
