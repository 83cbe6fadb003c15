"""What a page says of the trials of a sweep: ranked table, importance of parameters, parallel coordinates."""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maze.report.estimates import explained_share
from maze.report.page import number_text, page_section, table

RESULTS_FILE = "results.csv"
_AFTER_PARAMETERS = "seeds"
_WIDTH, _HEIGHT, _MARGIN, _TOP, _BOTTOM = 1180, 340, 70, 40, 20
_LABEL = 13.0
"""Height of a label beside an axis."""


@dataclass(frozen=True)
class Trials:
    """The trials of a sweep, the best one first.

    :param parameters: Values by name of the parameter, one for each trial.
    :param objective: What the trials have reached; NaN: nothing.
    :param rows: The table as the sweep has written it.
    :param header: Names of its columns.
    """

    parameters: dict[str, list[str]]
    objective: np.ndarray[Any, Any]
    rows: list[list[str]]
    header: list[str]


def read_trials(directory: Path) -> Trials | None:
    """The results of a sweep; `None`: it has none yet."""
    try:
        header, *rows = csv.reader(io.StringIO((directory / RESULTS_FILE).read_text(encoding="utf-8")))
        end = header.index(_AFTER_PARAMETERS)
        objective = header.index("objective")
    except (OSError, ValueError):
        return None
    rows = [row for row in rows if len(row) == len(header)]
    parameters = {name: [row[index] for row in rows] for index, name in enumerate(header[1:end], start=1)}
    values = np.array([_number(row[objective]) for row in rows], np.float64)
    return Trials(parameters, values, rows, header)


def sweep_sections(trials: Trials) -> list[str]:
    """The sections about the trials."""
    known = np.isfinite(trials.objective)
    parameters = {
        name: [value for value, is_known in zip(values, known, strict=True) if is_known]
        for name, values in trials.parameters.items()
    }
    objective = trials.objective[known]
    varied = {name: values for name, values in parameters.items() if len(set(values)) > 1}
    filled = [index for index in range(len(trials.header)) if any(row[index] for row in trials.rows)]
    rows = [[_typed(row[index]) for index in filled] for row in trials.rows]
    sections = [page_section("Trials", table([trials.header[index] for index in filled], rows))]
    if varied and len(objective) > 1:
        sections.append(page_section("Parallel coordinates", _parallel_coordinates(varied, objective)))
        sections.append(page_section("Importance of parameters", _importance(varied, objective)))
    return sections


def _importance(parameters: dict[str, list[str]], objective: np.ndarray[Any, Any]) -> str:
    shares = {name: explained_share(values, objective) for name, values in parameters.items()}
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    bars = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td class="number">{share:.0%}</td>'
        f'<td><i style="width: {share:.1%}"></i></td></tr>'
        for name, share in ordered
    )
    return (
        f'<table class="importance">{bars}</table>\n<p class="note">Share of the objective\'s variance that '
        f"differences in this parameter alone explain (ε², corrected for the number of groups), from {len(objective)} "
        "trials; parameters that matter only together show little.</p>\n"
    )


def _parallel_coordinates(parameters: dict[str, list[str]], objective: np.ndarray[Any, Any]) -> str:
    """A line for each trial through its parameters to its objective; the best trials in the strongest colour."""
    axes = [*parameters.items(), ("objective", [repr(float(value)) for value in objective])]
    places = np.linspace(_MARGIN, _WIDTH - _MARGIN, len(axes))
    heights = [_heights(values) for _, values in axes]
    parts, labels = [], []
    for x, (name, values), height in zip(places, axes, heights, strict=True):
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>')
        labels.append(f'<text x="{x:.1f}" y="{_TOP - 22}" text-anchor="middle">{html.escape(_end(name)[:24])}</text>')
        for value, y in _marks(values, height):
            labels.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}">{html.escape(value)}</text>')
    order = range(len(objective) - 1, -1, -1)  # the best one on top
    for trial in order:
        points = " ".join(f"{x:.1f},{height[trial]:.1f}" for x, height in zip(places, heights, strict=True))
        rank = 1.0 - trial / max(len(objective) - 1, 1)
        title = ", ".join(f"{_end(name)} {values[trial]}" for name, values in axes)
        parts.append(
            f'<polyline class="line" points="{points}" style="stroke: var(--c{0 if rank > 0.75 else 8}); '
            f'stroke-opacity: {0.2 + 0.75 * rank:.2f}"><title>{html.escape(title)}</title></polyline>'
        )
    return (
        f'<figure class="large drawn" tabindex="0"><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="parallel coordinates of {len(objective)} trials; the table above has the same numbers">'
        f"{''.join(parts + labels)}</svg></figure>\n"
    )


def _heights(values: Sequence[str]) -> list[float]:
    """Where values lie on an axis: numbers by size, others at equal distances."""
    numbers = [_number(value) for value in values]
    if not np.isfinite(numbers).all():
        names = sorted(set(values))
        numbers = [float(names.index(value)) for value in values]
    elif min(numbers) > 0 and max(numbers) / min(numbers) > 50:
        numbers = [float(np.log(number)) for number in numbers]
    low, high = min(numbers), max(numbers)
    room = _HEIGHT - _BOTTOM - _TOP
    return [_HEIGHT - _BOTTOM - room * ((number - low) / (high - low) if high > low else 0.5) for number in numbers]


def _marks(values: Sequence[str], heights: Sequence[float]) -> list[tuple[str, float]]:
    """What is written beside an axis: all of a few values, else the ends; none over another."""
    marks = dict(sorted(zip(values, heights, strict=True), key=lambda mark: mark[1]))
    first, *others = marks.items()
    kept = [first]
    for value, y in others if len(others) < 6 else others[-1:]:
        if y - kept[-1][1] >= _LABEL:
            kept.append((value, y))
    return [(number_text(_number(value)) if np.isfinite(_number(value)) else value[:18], y) for value, y in kept]


def _typed(text: str) -> str | float:
    number = _number(text)
    return number if np.isfinite(number) else text


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return np.nan


def _end(name: str) -> str:
    return name.rpartition(".")[2]
