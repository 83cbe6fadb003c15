"""The page of a comparison."""

from __future__ import annotations

import html
from collections.abc import Iterator
from datetime import datetime

import numpy as np

from maze.evaluation.comparison import ComparedMeasure, Comparison
from maze.report.estimates import Estimate, Values
from maze.report.page import Cell, MarkedNumber, Page, number_text, page_section, table

_WIDTH, _SIDE, _NAME, _ROW, _BOTTOM = 500, 14, 18, 48, 24
"""Width of a figure, room at its sides, height of a name, of the row that it stands in, and of the axis."""
_N_DOTS = 200


def comparison_page(comparison: Comparison, written: datetime) -> Page:
    """The page: for each measure the policies with their intervals, and their differences from the first one.

    :param comparison: The policies.
    :param written: The time that the page shows.
    """
    names = [played.name for played in comparison.played]
    return Page(
        title=" / ".join(names) if len(names) <= 4 else f"{len(names)} policies",
        subtitle=f"{comparison.n_episodes} episodes, the same for all policies; {names[0]} is what others differ from",
        note=f"written {written:%Y-%m-%d %H:%M:%S}; 95 % intervals over episodes and runs; "
        "IQM: mean of the middle half (Agarwal et al. 2021)",
        sections=[page_section("Overview", _overview(comparison)), *_measures(comparison)],
    )


def _overview(comparison: Comparison) -> str:
    rows: list[list[Cell]] = []
    for played in comparison.played:
        row: list[Cell] = [played.name]
        for measure in comparison.measures:
            found = next(each for each in comparison.rows_of(measure) if each.policy == played.name)
            row.append(MarkedNumber(found.mean.value, _verdict(comparison, found)))
        rows.append(row)
    better = (
        "▲ better, ▼ worse than the first policy (* different from it): the interval of the difference leaves out 0"
    )
    return table(["policy", *comparison.measures], rows, f"Means over episodes; {better}")


def _verdict(comparison: Comparison, row: ComparedMeasure) -> str:
    if row.difference is None or not comparison.is_told_apart(row):
        return ""
    if not comparison.goal(row.measure):
        return " *"
    is_less = row.difference.value < 0
    return " ▲" if is_less == (row.measure in comparison.minimized) else " ▼"


def _measures(comparison: Comparison) -> Iterator[str]:
    header = ("policy", "mean", "95 %", "IQM", "95 % of IQM", "difference", "95 % of difference")
    for measure in comparison.measures:
        rows = [_row(row) for row in comparison.rows_of(measure)]
        figures = _means_figure(comparison, measure) + _differences_figure(comparison, measure)
        yield page_section(
            f"{measure}{comparison.goal(measure)}",
            f'<div class="pair">{figures}</div>\n',
            facts=table(
                (*header, comparison.improvement_name(measure), "95 % of P"),
                rows,
                f"{measure}: means, and differences from {comparison.played[0].name}",
            ),
        )


def _row(row: ComparedMeasure) -> list[Cell]:
    cells: list[Cell] = [row.policy]
    for estimate in (row.mean, row.interquartile_mean, row.difference, row.improvement):
        cells += [None, ""] if estimate is None else [estimate.value, _interval(estimate)]
    return cells


def _interval(estimate: Estimate) -> str:
    return f"{number_text(estimate.low)} to {number_text(estimate.high)}" if estimate.is_known else ""


def _means_figure(comparison: Comparison, measure: str) -> str:
    dots = [played.measures[measure].mean(axis=0) for played in comparison.played]
    rows = [(row.policy, row.mean) for row in comparison.rows_of(measure)]
    return _figure("Episodes, and their mean with its interval", rows, dots, None)


def _differences_figure(comparison: Comparison, measure: str) -> str:
    reference, *others = comparison.played
    centre = reference.measures[measure].mean(axis=0)
    dots = [played.measures[measure].mean(axis=0) - centre for played in others]
    rows = [(row.policy, row.difference) for row in comparison.rows_of(measure) if row.difference is not None]
    return _figure(f"Difference from {reference.name} in the same episode", rows, dots, 0.0) if rows else ""


def _figure(
    title: str,
    rows: list[tuple[str, Estimate]],
    dots: list[Values],
    line: float | None,
) -> str:
    """A row for each policy: its episodes as dots, the mean as a bar with its interval."""
    values = np.concatenate([*dots, [end for _, estimate in rows for end in estimate], [] if line is None else [line]])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    if not high > low:
        low, high = low - 0.5, high + 0.5
    height = _ROW * len(rows) + _BOTTOM

    def x(value: float) -> float:
        return _SIDE + (_WIDTH - 2 * _SIDE) * (value - low) / (high - low)

    parts = [
        f'<line class="axis" x1="{_SIDE}" x2="{_WIDTH - _SIDE}" y1="{height - _BOTTOM}" y2="{height - _BOTTOM}"/>',
        f'<text x="{_SIDE}" y="{height - 6}">{html.escape(number_text(float(f"{low:.4g}")))}</text>',
        f'<text x="{_WIDTH - _SIDE}" y="{height - 6}" text-anchor="end">{number_text(float(f"{high:.4g}"))}</text>',
    ]
    if line is not None:
        parts.append(f'<line class="cursor" x1="{x(line):.1f}" x2="{x(line):.1f}" y1="0" y2="{height - _BOTTOM}"/>')
    for index, ((name, estimate), points) in enumerate(zip(rows, dots, strict=True)):
        y = _ROW * index + (_ROW + _NAME) / 2
        colour = f"var(--c{(index + (line is not None)) % 10})"
        parts.append(f'<text x="{_SIDE}" y="{_ROW * index + _NAME - 4}">{html.escape(_cut(name))}</text>')
        shown = points[:: -(-len(points) // _N_DOTS)]
        # Spread over the row by a fixed rule, so that equal values do not hide each other.
        offsets = (np.arange(len(shown)) * 0.618 % 1.0 - 0.5) * (_ROW - _NAME) * 0.7
        parts += [
            f'<circle cx="{x(value):.1f}" cy="{y + offset:.1f}" r="2" style="fill: {colour}" fill-opacity="0.35"/>'
            for value, offset in zip(shown.tolist(), offsets.tolist(), strict=True)
            if np.isfinite(value)
        ]
        if estimate.is_known:
            parts.append(
                f'<line x1="{x(estimate.low):.1f}" x2="{x(estimate.high):.1f}" y1="{y}" y2="{y}" '
                f'style="stroke: {colour}" stroke-width="4" stroke-linecap="round"/>'
            )
        parts.append(
            f'<circle cx="{x(estimate.value):.1f}" cy="{y}" r="5" style="fill: {colour}; stroke: var(--card)"/>'
        )
    label = "; ".join(f"{name} {number_text(estimate.value)}" for name, estimate in rows)
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg></figure>'
    )


def _cut(name: str) -> str:
    return name if len(name) <= 40 else f"{name[:39]}…"
