"""Which statistics a chart shows; the page's script draws it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from maze.core.log_stats.stats_format import QUANTILES, SHARE
from maze.report.progress import StatisticsOfPath

SPREAD = ("mean", "std", "min", "max")
"""Statistics of one event that are drawn in one chart."""


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    :param label: Its name in the legend.
    :param path: Prefix of its statistics.
    :param column: Name of the statistic.
    :param std: A statistic by which a band around it is drawn.
    :param low: Lower end of a band.
    :param high: Upper end of a band.
    :param run: Number of the run.
    :param colour: Number of its colour; `None`: the next one.
    """

    label: str
    path: str
    column: str
    std: str | None = None
    low: str | None = None
    high: str | None = None
    run: int = 0
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """What the page's script draws.

    :param name: What is shown.
    :param series: Its lines.
    :param kind: `line`, or `stack` for shares that add up to one.
    :param is_large: Whether it is as wide as the page.
    """

    name: str
    series: Sequence[Series]
    kind: Literal["line", "stack"] = "line"
    is_large: bool = False
    is_spread: bool = field(default=False, kw_only=True)
    """Whether it shows mean and spread of an event."""

    @property
    def is_distribution(self) -> bool:
        """Whether it shows how values are distributed."""
        return self.kind == "stack" or any(series.column.endswith("/p50") for series in self.series)

    def as_json(self) -> dict[str, Any]:
        """What the script is given."""
        series = [{key: value for key, value in vars(each).items() if value is not None} for each in self.series]
        return {"name": self.name, "kind": self.kind, "series": series}


def chart_of_statistic(event: str, paths: Sequence[StatisticsOfPath], is_large: bool = False) -> list[Chart]:
    """The chart of one event's mean with its spread, a line per prefix; none where there is no such event."""
    charts = [chart for chart in charts_of_columns(paths) if chart.name == event and chart.is_spread]
    return [Chart(each.name, each.series, each.kind, is_large, is_spread=True) for each in charts]


def charts_of_columns(paths: Sequence[StatisticsOfPath], run: int = 0) -> Iterator[Chart]:
    """Charts of all statistics: mean and spread of an event in one, all shares of a distribution in one.

    :param paths: The statistics; those of `eval` come first in each chart.
    :param run: Number of the run.
    """
    paths = sorted(paths, key=lambda each: (each.path != "eval", each.path != "train", each.path))
    groups: dict[tuple[str, str], list[tuple[StatisticsOfPath, str]]] = {}
    for statistics in paths:
        for column in statistics.columns:
            kind, name = _kind(column)
            # A stack shows one distribution; evaluation and training have one each.
            key = (kind, f"{name} ({statistics.path})" if kind == "share" and statistics.path else name)
            groups.setdefault(key, []).append((statistics, column))
    for (kind, name), members in groups.items():
        if kind == "share":
            ordered = sorted(members, key=lambda member: int(member[1].rpartition(SHARE)[2]))
            shares = [Series(column.rpartition(SHARE)[2], each.path, column, run=run) for each, column in ordered]
            yield Chart(name, shares, "stack")
        elif kind == "quantile":
            lines = [_quantile_series(each, name, run) for each, column in members if column.endswith("/p50")]
            yield Chart(name, lines)
        elif kind == "spread":
            lines = [_spread_series(each, name, run) for each in paths if (each, _mean(name)) in members]
            if lines:
                yield Chart(name, lines, is_spread=True)
            lone = [column for each, column in members if _mean(name) not in each.columns]
            for column in dict.fromkeys(lone):
                yield _plain(column, [each for each, other in members if other == column], run)
        else:
            yield _plain(name, [each for each, _ in members], run)


def column_of(statistics: StatisticsOfPath | None, name: str) -> np.ndarray[Any, Any]:
    """The values of a statistic where there are some, `[n_values]`."""
    values = np.asarray([] if statistics is None else statistics.columns.get(name, []), np.float64)
    return values[np.isfinite(values)]


def _plain(name: str, paths: Sequence[StatisticsOfPath], run: int) -> Chart:
    return Chart(name, [Series(each.path, each.path, name, run=run) for each in paths])


def _kind(column: str) -> tuple[str, str]:
    """How a statistic is drawn, and the name of its chart."""
    head, _, end = column.rpartition("/")
    if end in QUANTILES:
        return "quantile", head
    if end.startswith(SHARE) and end[len(SHARE) :].isdecimal():
        return "share", head
    parts = column.split("/", 3)
    if len(parts) > 2 and parts[2] in SPREAD:
        return "spread", "/".join([*parts[:2], *parts[3:]])
    return "plain", column


def _mean(name: str) -> str:
    return _of_event(name, "mean")


def _of_event(name: str, statistic: str) -> str:
    """The column of a statistic of the event (and group) that a chart of spread is named by."""
    interface, event, *group = name.split("/", 2)
    return "/".join([interface, event, statistic, *group])


def _spread_series(statistics: StatisticsOfPath, name: str, run: int) -> Series:
    names = {each: _of_event(name, each) for each in SPREAD}
    known = {each: column for each, column in names.items() if column in statistics.columns}
    low, high = (known.get("min"), known.get("max")) if {"min", "max"} <= set(known) else (None, None)
    return Series(statistics.path, statistics.path, names["mean"], known.get("std"), low, high, run)


def _quantile_series(statistics: StatisticsOfPath, name: str, run: int) -> Series:
    return Series(statistics.path, statistics.path, f"{name}/p50", low=f"{name}/p05", high=f"{name}/p95", run=run)
