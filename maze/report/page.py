"""Self-contained HTML reports (styles, script and data in one file) and their charts."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from maze.core.log_stats.stats_format import QUANTILES, SHARE
from maze.core.utils.files import write_whole
from maze.report.progress import Progress, StatisticsOfPath

MOST_POINTS = 1000
"""Largest number of rows of a prefix on a page; longer histories are thinned to equal distances."""
CONTENT_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: a page loads nothing from other sites."""

# Largest number of characters on one line of a table, and of a text in a table.
_WHOLE, _LONGEST = 32, 2000


class Tile(NamedTuple):
    """A headline figure.

    :param label: Its name.
    :param value: The number.
    :param text: Shown in its place; empty: the number.
    """

    label: str
    value: float
    text: str = ""


class MarkedNumber(NamedTuple):
    """A number in a table, followed by a mark."""

    value: float
    mark: str


Cell = str | float | MarkedNumber | None
"""Content of a cell of a table; `None`: no value."""


@dataclass
class RunData:
    """The numbers of a run in the format of the page's script.

    :param name: Name of the run, as text.
    """

    name: str
    paths: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    """Encoded rows by their prefix."""

    @staticmethod
    def of(name: str, progress: Progress, n_points: int = MOST_POINTS) -> RunData:
        """Collect the statistics of a run.

        :param name: Name of the run.
        :param progress: The statistics.
        :param n_points: Largest number of rows of each prefix.
        """
        data = RunData(name)
        for path, statistics in progress.paths.items():
            rows = np.unique(np.linspace(0, len(statistics) - 1, min(len(statistics), n_points)).round().astype(int))
            axes = {"step": statistics.steps, "seconds": statistics.seconds, "env_steps": statistics.env_steps}
            parts = ({n: np.asarray(v)[rows] for n, v in part.items()} for part in (axes, statistics.columns))
            data.add_path(path, *parts)
        return data

    def add_path(
        self, path: str, axes: Mapping[str, np.ndarray[Any, Any]], columns: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Add rows.

        :param path: Their prefix.
        :param axes: Values of any of `step`, `seconds` and `env_steps`.
        :param columns: Values by name, as many as on each axis.
        """
        self.paths[path] = {
            **{axis: _encoded(values) for axis, values in axes.items()},
            "columns": [[name, _encoded(values)] for name, values in columns.items()],
        }


@dataclass(frozen=True)
class Page:
    """A self-contained HTML page.

    :param title: Heading, as text.
    :param subtitle: Subheading, as text.
    :param sections: The sections, as HTML.
    :param runs: The numbers of the charts.
    :param state: Shown as a badge, such as `running`.
    :param note: A line in small letters, as text.
    :param error: Error message, as text.
    """

    title: str
    subtitle: str
    sections: Sequence[str]
    runs: Sequence[RunData] = ()
    state: str = ""
    note: str = ""
    error: str | None = None

    def write(self, path: Path) -> None:
        """Write the page atomically, in UTF-8.

        :param path: The file, which is replaced if it exists.
        :raises OSError: It cannot be written.
        """
        write_whole(path, self.text().encode("utf-8", errors="replace"))

    def text(self) -> str:
        """Return the page as HTML."""
        word = "".join(filter(str.isalnum, self.state))
        badge = f' <span class="state {word}">{html.escape(self.state)}</span>' if self.state else ""
        failure = f'<pre class="error" role="alert">{html.escape(self.error)}</pre>' if self.error else ""
        title = html.escape(self.title)
        return "".join(
            (
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
                f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n',
                '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
                f"<title>{title}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>\n<header>\n",
                f'<h1>{title}{badge}</h1>\n<p class="subtitle">{html.escape(self.subtitle)}</p>\n',
                f'<p class="note">{html.escape(self.note)}</p>\n{failure}<div class="controls"></div>\n</header>\n',
                "<main>\n",
                *self.sections,
                f'</main>\n<script id="runs" type="application/json">{_json([*map(vars, self.runs)])}',
                f"</script>\n<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n",
            )
        )


def page_section(title: str, content: str = "", charts: Sequence[Chart] = (), facts: str = "") -> str:
    """Return a section with its heading; empty if it has no content.

    :param title: The heading, as text.
    :param content: HTML.
    :param charts: Charts, which the page's script draws.
    :param facts: HTML below the charts.
    """
    if not (content or charts or facts):
        return ""
    sizes = ((chart, ' class="large"' if chart.is_large else "") for chart in charts)
    figures = "".join(
        f'<figure{size} data-chart="{html.escape(_json(chart.as_json()))}"></figure>\n' for chart, size in sizes
    )
    grid = f'<div class="charts">{figures}</div>' if figures else ""
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}{grid}{facts}</section>\n"


def tiles(entries: Iterable[Tile]) -> str:
    """Return headline figures."""
    shown = "".join(
        f'<div class="tile"><dt>{html.escape(tile.label)}</dt><dd title="{tile.value!r}">'
        f"{html.escape(tile.text or number_text(tile.value))}</dd></div>"
        for tile in entries
    )
    return f'<dl class="tiles">{shown}</dl>\n' if shown else ""


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Return pairs of a name and a text as a table."""
    rows = "".join(
        f'<tr><th scope="row">{_breakable(name)}</th><td>{_breakable(text)}</td></tr>' for name, text in facts
    )
    return f'<table class="facts">{rows}</table>\n' if rows else ""


def code_list(commands: Iterable[tuple[str, str]]) -> str:
    """Return commands with their purpose and a button that copies each."""
    return "".join(
        f'<div class="command"><h3>{html.escape(name)}</h3><pre tabindex="0">{html.escape(command)}</pre></div>\n'
        for name, command in commands
    )


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """Return a table that is sorted by a click on a heading.

    :param header: Names of the columns.
    :param rows: Texts and numbers; numbers are rounded, and shown in full on demand.
    :param caption: Caption.
    """
    head = "".join(f'<th scope="col">{_breakable(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{html.escape(caption or "table")}">'
        f'<table class="sortable">{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'
    )


def details(summary: str, text: str) -> str:
    """Return a text that is shown on demand."""
    return f'<details><summary>{html.escape(summary)}</summary><pre tabindex="0">{html.escape(text)}</pre></details>\n'


def number_text(value: float) -> str:
    """Format a number with five significant digits, large ones with separators."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e15:
        return f"{value:.5g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.5g}"


def _cell(content: Cell) -> str:
    if content is None:
        return '<td class="number">-</td>'
    if isinstance(content, str):
        if len(content) <= _WHOLE:
            return f'<td class="whole">{html.escape(content)}</td>'
        return f'<td class="long">{_breakable(content)}</td>'
    value, mark = content if isinstance(content, MarkedNumber) else (content, "")
    text = html.escape(f"{number_text(value)}{mark}")
    return f'<td class="number" data-value="{value!r}" title="{value!r}">{text}</td>'


def _breakable(text: str) -> str:
    """Allow line breaks in names after a dot, a slash or an underscore, but not in numbers."""
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return re.sub(r"[/._](?!\d)", r"\g<0><wbr>", html.escape(shown))


def _encoded(values: np.ndarray[Any, Any]) -> str:
    """Encode numbers for the script: exact, small and fast."""
    return base64.b64encode(np.asarray(values, "<f8").tobytes()).decode()


def _json(content: Any) -> str:
    # "</script>" in a text would end the data
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _resource(name: str) -> str:
    return resources.files("maze.report").joinpath(name).read_text(encoding="utf-8")


SPREAD = ("mean", "std", "min", "max")
"""Statistics of an event that share a chart."""


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    :param label: Its name in the legend.
    :param path: Prefix of its statistics.
    :param column: Name of the statistic.
    :param std: Statistic of the width of a band.
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
    """A chart, which the page's script draws.

    :param name: Title.
    :param series: Its lines.
    :param kind: `line`, or `stack` for shares that add up to one.
    :param is_large: Whether it has the width of the page.
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
        """Return the data for the script."""
        series = [{key: value for key, value in vars(each).items() if value is not None} for each in self.series]
        return {"name": self.name, "kind": self.kind, "series": series}


def charts_of_columns(paths: Sequence[StatisticsOfPath]) -> Iterator[Chart]:
    """Yield charts of all statistics: one for mean and spread of an event, one for all shares of a distribution.

    :param paths: The statistics; `eval` comes first in each chart.
    """
    paths = sorted(paths, key=lambda each: (each.path != "eval", each.path != "train", each.path))
    groups: dict[tuple[str, str], list[tuple[StatisticsOfPath, str]]] = {}
    for statistics in paths:
        for column in statistics.columns:
            kind, name = _kind(column, statistics)
            # a stack shows one distribution, so evaluation and training have separate charts
            key = (kind, f"{name} ({statistics.path})" if kind == "share" and statistics.path else name)
            groups.setdefault(key, []).append((statistics, column))
    for (kind, name), members in groups.items():
        if kind == "share":
            ordered = sorted(members, key=lambda member: int(member[1].rpartition(SHARE)[2]))
            shares = [Series(column.rpartition(SHARE)[2], each.path, column) for each, column in ordered]
            yield Chart(name, shares, "stack")
        elif kind == "quantile":
            median, low, high = (f"{name}/{end}" for end in ("p50", "p05", "p95"))
            paths_of = [each.path for each, column in members if column == median]
            yield Chart(name, [Series(path, path, median, low=low, high=high) for path in paths_of])
        elif kind == "spread":
            mean = _of_event(name, "mean")
            lines = [_spread_series(each, name) for each, column in members if column == mean]
            yield Chart(name, lines, is_spread=True)
        else:
            yield Chart(name, [Series(each.path, each.path, name) for each, _ in members])


def column_of(statistics: StatisticsOfPath | None, name: str) -> np.ndarray[Any, Any]:
    """Return the finite values of a statistic, `[n_values]`."""
    values = np.asarray([] if statistics is None else statistics.columns.get(name, []), np.float64)
    return values[np.isfinite(values)]


def _kind(column: str, statistics: StatisticsOfPath) -> tuple[str, str]:
    """Return the kind of chart of a statistic and its name; a spread is shown around the mean, if there is one."""
    head, _, end = column.rpartition("/")
    if end in QUANTILES:
        return "quantile", head
    if end.startswith(SHARE) and end[len(SHARE) :].isdecimal():
        return "share", head
    parts = column.split("/", 3)
    if len(parts) > 2 and parts[2] in SPREAD:
        event = "/".join([*parts[:2], *parts[3:]])
        if _of_event(event, "mean") in statistics.columns:
            return "spread", event
    return "plain", column


def _of_event(name: str, statistic: str) -> str:
    """Return the column of a statistic of the event (and group) that names a chart."""
    interface, event, *group = name.split("/", 2)
    return "/".join([interface, event, statistic, *group])


def _spread_series(statistics: StatisticsOfPath, name: str) -> Series:
    names = {each: _of_event(name, each) for each in SPREAD}
    known = {each: column for each, column in names.items() if column in statistics.columns}
    low, high = (known.get("min"), known.get("max")) if {"min", "max"} <= set(known) else (None, None)
    return Series(statistics.path, statistics.path, names["mean"], known.get("std"), low, high)
