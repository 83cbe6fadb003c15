"""Pages that need nothing but the file: HTML, styles, script and data in one."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.utils.files import write_whole
from maze.report.charts import Chart
from maze.report.progress import Progress

MOST_POINTS = 1000
"""Rows of a prefix that a page has; of longer histories, rows at equal distances and the last one."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "connect-src 'self'; frame-src 'self'"
)
"""What a page may load: nothing from elsewhere. Frames inherit it, also one with a page that somebody else has made."""

_WHOLE, _LONGEST = 32, 2000
"""Texts up to so many characters stand on one line of a table; of texts in tables, so many are shown."""


class Tile(NamedTuple):
    """A number to be seen first.

    :param label: What it is.
    :param value: The number.
    :param unit: `s` is shown as a duration.
    """

    label: str
    value: float
    unit: str = ""


class MarkedNumber(NamedTuple):
    """A number in a table with a mark behind it."""

    value: float
    mark: str


Cell = str | float | MarkedNumber | None
"""What a cell of a table holds; `None`: there is nothing to say."""


class RunData:
    """The numbers of a run, as the page's script reads them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._paths: dict[str, dict[str, Any]] = {}
        self._rows: dict[str, np.ndarray[Any, Any]] = {}

    @staticmethod
    def of(name: str, progress: Progress, n_points: int = MOST_POINTS) -> RunData:
        """The statistics of a run.

        :param name: Of the run.
        :param progress: The statistics.
        :param n_points: At most so many rows of each prefix.
        """
        data = RunData(name)
        for path, statistics in progress.paths.items():
            rows = np.unique(np.linspace(0, len(statistics) - 1, min(len(statistics), n_points)).round().astype(int))
            data._rows[path] = rows
            axes = {"step": statistics.steps, "seconds": statistics.seconds, "env_steps": statistics.env_steps}
            data._paths[path] = {
                **{axis: _encoded(np.asarray(values)[rows]) for axis, values in axes.items()},
                "columns": [[each, _encoded(np.asarray(values)[rows])] for each, values in statistics.columns.items()],
            }
        return data

    def add(self, path: str, name: str, values: np.ndarray[Any, Any]) -> None:
        """Adds a column that is derived from others.

        :param path: Prefix of the rows that it belongs to.
        :param name: Of the column.
        :param values: One for each row of the prefix, also of those that are left out.
        """
        self._paths[path]["columns"].append([name, _encoded(values[self._rows[path]])])

    def add_path(
        self, path: str, axes: Mapping[str, np.ndarray[Any, Any]], columns: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """Adds rows that are derived from others.

        :param path: Their prefix.
        :param axes: Any of `step`, `seconds` and `env_steps`.
        :param columns: Values by name, as many as there are on each axis.
        """
        self._paths[path] = {
            **{axis: _encoded(values) for axis, values in axes.items()},
            "columns": [[name, _encoded(values)] for name, values in columns.items()],
        }

    def as_json(self) -> dict[str, Any]:
        """What the script is given."""
        return {"name": self.name, "paths": self._paths}


@dataclass(frozen=True)
class Page:
    """A page that needs nothing but its file.

    :param title: Heading, as text.
    :param subtitle: Below it, as text.
    :param sections: The sections, as HTML.
    :param runs: The numbers that charts refer to.
    :param state: Shown as a badge, such as `running`.
    :param note: A line in small letters, as text.
    :param error: What went wrong, as text.
    """

    title: str
    subtitle: str
    sections: Sequence[str]
    runs: Sequence[RunData] = ()
    state: str = ""
    note: str = ""
    error: str | None = None

    def write(self, path: Path) -> None:
        """Writes the page, whole or not at all.

        :raises OSError: The disk does not take it.
        """
        content = self.text().encode("utf-8", errors="replace")
        write_whole(path, content)

    def text(self, version: str | None = None) -> str:
        """The page.

        :param version: What the server of the page calls it; it is loaded again when there is another one.
        """
        badge = f' <span class="state {_word(self.state)}">{html.escape(self.state)}</span>' if self.state else ""
        failure = f'<pre class="error" role="alert">{html.escape(self.error)}</pre>' if self.error else ""
        live = "" if version is None else f'<meta name="maze-live" content="{html.escape(version)}">\n'
        title = html.escape(self.title)
        return "".join(
            (
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
                f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n',
                f'<meta name="viewport" content="width=device-width, initial-scale=1">\n{live}',
                f"<title>{title}</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>\n<header>\n",
                f'<h1>{title}{badge}</h1>\n<p class="subtitle">{html.escape(self.subtitle)}</p>\n',
                f'<p class="note">{html.escape(self.note)}</p>\n{failure}<div class="controls"></div>\n</header>\n',
                "<main>\n",
                *self.sections,
                f'</main>\n<script id="runs" type="application/json">{_json([run.as_json() for run in self.runs])}',
                f"</script>\n<script>\n{_resource('page.js')}</script>\n</body>\n</html>\n",
            )
        )


def page_section(title: str, content: str = "", charts: Sequence[Chart] = (), facts: str = "") -> str:
    """A section with its heading; none where it is empty.

    :param title: The heading, as text.
    :param content: HTML.
    :param charts: Drawn by the page's script.
    :param facts: HTML, below the rest.
    """
    if not (content or charts or facts):
        return ""
    figures = "".join(map(_figure, charts))
    grid = f'<div class="charts">{figures}</div>' if figures else ""
    return f"<section>\n<h2>{html.escape(title)}</h2>\n{content}{grid}{facts}</section>\n"


def tiles(entries: Iterable[Tile]) -> str:
    """Numbers to be seen first."""
    shown = "".join(
        f'<div class="tile"><dt>{html.escape(tile.label)}</dt><dd title="{tile.value!r}">{_tile_text(tile)}</dd></div>'
        for tile in entries
    )
    return f'<dl class="tiles">{shown}</dl>\n' if shown else ""


def fact_list(facts: Iterable[tuple[str, str]]) -> str:
    """Pairs of a name and a text, as a table."""
    rows = "".join(
        f'<tr><th scope="row">{_breakable(name)}</th><td>{_breakable(text)}</td></tr>' for name, text in facts
    )
    return f'<table class="facts">{rows}</table>\n' if rows else ""


def code_list(commands: Iterable[tuple[str, str]]) -> str:
    """Commands with what they are for, and a button that copies each."""
    return "".join(
        f'<div class="command"><h3>{html.escape(name)}</h3><pre tabindex="0">{html.escape(command)}</pre></div>\n'
        for name, command in commands
    )


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> str:
    """A table that a click on a heading sorts.

    :param header: Names of the columns.
    :param rows: Texts, and numbers, which are rounded to what is read easily and shown in full on demand.
    :param caption: Above it.
    """
    head = "".join(f'<th scope="col">{_breakable(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>\n" for row in rows)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide" tabindex="0" role="group" aria-label="{html.escape(caption or "table")}">'
        f'<table class="sortable">{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>\n'
    )


def details(summary: str, text: str) -> str:
    """A longer text that is shown on demand."""
    return f'<details><summary>{html.escape(summary)}</summary><pre tabindex="0">{html.escape(text)}</pre></details>\n'


def embedded_page(title: str, page: str) -> str:
    """Another page in a frame of its own, which has nothing to do with this page's script."""
    return (
        f'<iframe title="{html.escape(title)}" loading="lazy" sandbox="allow-scripts" '
        f'srcdoc="{html.escape(page)}"></iframe>\n'
    )


def embedded_picture(name: str, svg: str) -> str:
    """A picture from an SVG file; as an image, in which no script runs."""
    data = base64.b64encode(svg.encode()).decode()
    return (
        f'<figure class="picture"><img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{html.escape(name)}</figcaption></figure>\n"
    )


def number_text(value: float) -> str:
    """A number with five significant digits, large ones with separators."""
    if not math.isfinite(value):
        return str(value)
    if abs(value) >= 1e15:
        return f"{value:.5g}"
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.5g}"


def _tile_text(tile: Tile) -> str:
    if tile.unit != "s":
        return html.escape(number_text(tile.value))
    seconds = tile.value
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{number_text(round(seconds / 3600, 1))} h"


def _cell(content: Cell) -> str:
    if content is None:
        return '<td class="number">-</td>'
    if isinstance(content, str):
        is_whole = len(content) <= _WHOLE
        return (
            f'<td class="whole">{html.escape(content)}</td>'
            if is_whole
            else f'<td class="long">{_breakable(content)}</td>'
        )
    value, mark = content if isinstance(content, MarkedNumber) else (content, "")
    text = html.escape(f"{number_text(value)}{mark}")
    return f'<td class="number" data-value="{value!r}" title="{value!r}">{text}</td>'


def _breakable(text: str) -> str:
    """Text in which long names may break behind a dot, a slash or an underscore, but no number does."""
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
    return re.sub(r"[/._](?!\d)", r"\g<0><wbr>", html.escape(shown))


def _figure(chart: Chart) -> str:
    size = ' class="large"' if chart.is_large else ""
    return f'<figure{size} data-chart="{html.escape(_json(chart.as_json()))}"></figure>\n'


def _word(text: str) -> str:
    return "".join(letter for letter in text if letter.isalnum())


def _encoded(values: np.ndarray[Any, Any]) -> str:
    """Numbers as the script reads them: exact, small and quick."""
    return base64.b64encode(np.asarray(values, "<f8").tobytes()).decode()


def _json(content: Any) -> str:
    # A "</script>" in some text would end the data early.
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _resource(name: str) -> str:
    return resources.files("maze.report").joinpath(name).read_text(encoding="utf-8")
