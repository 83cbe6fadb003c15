"""Tables and charts of documentation pages that benchmarks write.

A table is between `<!-- results: NAME -->` and `<!-- end -->`. A chart is an SVG file that the page includes; its
colours are classes of `docs/_static/site.css`, so that it follows the theme. The charts of these pages follow from
their tables:

    python -m benchmarks.page_tables docs/benchmarks/job_shop.md docs/benchmarks/operations.md \\
        docs/benchmarks/imitation.md
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import zip_longest
from pathlib import Path
from statistics import mean

WIDTH, LABELS, ROW = 900, 430, 24
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without the columns that are empty in all rows.

    :param header: Names of the columns.
    :param rows: Cells.
    """
    columns = [index for index in range(len(header)) if not rows or any(row[index] for row in rows)]
    shown = [[cells[index] for index in columns] for cells in (header, *rows)]
    lines = [f"| {' | '.join(cells)} |" for cells in (shown[0], ["---"] * len(columns), *shown[1:])]
    return "\n".join(lines)


def rows_of(page: Path, name: str, header: Sequence[str]) -> dict[str, list[str]]:
    """Return the rows of a table of a page by their first cell, with the cells of all columns.

    :param page: The page.
    :param name: Name of the table.
    :param header: Names of all columns; those that the table leaves out are empty.
    """
    return {row[header[0]]: [row.get(column, "") for column in header] for row in _table(page, name)}


def _table(page: Path, name: str) -> list[dict[str, str]]:
    """Cells of a table by column, row by row; none where the page has no such table."""
    found = re.search(f"{re.escape(_begin(name))}\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for line in found[1].splitlines() if line.startswith("|")] if found else []
    shown, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines] or [[]]
    return [dict(zip_longest(shown, row, fillvalue="")) for row in rows[1:]]


def write_table(page: Path, name: str, table: str) -> None:
    """Replace a table of a page.

    :param page: The page.
    :param name: Name of the table.
    :param table: Its new text.
    :raises SystemExit: The page has no such table.
    """
    begin = _begin(name)
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    pattern = re.compile(f"{re.escape(begin)}\n.*?<!-- end -->", re.DOTALL)
    if not pattern.search(text):
        raise SystemExit(f"{page}: expected the lines `{begin}` and `<!-- end -->`, found none.")
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{table}\n\n<!-- end -->", text, count=1), encoding="utf-8")


def _begin(name: str) -> str:
    return f"<!-- results: {name} -->"


@dataclass(frozen=True)
class Bar:
    """A figure and its range."""

    label: str
    value: float
    low: float
    high: float
    is_ours: bool = True


def bar_chart(title: str, bars: Sequence[Bar]) -> str:
    """Return an SVG of ratios as horizontal bars from 1 on a logarithmic axis, with their ranges.

    :param title: Accessible name of the picture.
    :param bars: The bars from top to bottom.
    """
    low = min([0.5, *(bar.low for bar in bars)])
    high = max([2.0, *(bar.high for bar in bars)]) * 1.3
    bottom = ROW * len(bars) + 10

    def x(value: float) -> float:
        return LABELS + (WIDTH - LABELS - 60) * math.log(value / low) / math.log(high / low)

    parts = []
    for tick in (each for each in TICKS if low <= each <= high):
        style = "one" if tick == 1 else "axis"
        parts.append(f'<path class="{style}" d="M{x(tick):.1f} 4V{bottom}"/>')
        parts.append(f'<text class="middle muted" x="{x(tick):.1f}" y="{bottom + 16}">{tick:g}</text>')
    for index, bar in enumerate(bars):
        y, left, right = 8 + ROW * index, *sorted((x(1.0), x(bar.value)))
        parts.append(f'<text class="end" x="{LABELS - 8}" y="{y + 13}">{escape(bar.label)}</text>')
        parts.append(f'<rect class="ours" x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="16"/>')
        if bar.low < bar.high:
            parts.append(f'<path class="range" d="M{x(bar.low):.1f} {y + 8}H{x(bar.high):.1f}"/>')
        parts.append(f'<text x="{x(max(bar.high, 1.0)) + 6:.1f}" y="{y + 13}">{bar.value:.3g}</text>')
    return _svg(title, bottom + 24, parts)


def value_chart(title: str, bars: Sequence[Bar], unit: str) -> str:
    """Return an SVG of figures as horizontal bars from 0 on a linear axis, with their ranges.

    :param title: Accessible name of the picture.
    :param bars: The bars from top to bottom.
    :param unit: Unit of the figures.
    """
    high = max(bar.high for bar in bars)

    def x(value: float) -> float:
        return LABELS + (WIDTH - LABELS - 90) * max(value, 0.0) / high

    parts = [f'<path class="axis" d="M{LABELS} 4V{ROW * len(bars) + 10}"/>']
    for index, bar in enumerate(bars):
        y, style = 8 + ROW * index, "ours" if bar.is_ours else "band-peer"
        parts.append(f'<text class="end" x="{LABELS - 8}" y="{y + 13}">{escape(bar.label)}</text>')
        width = x(bar.value) - LABELS
        parts.append(f'<rect class="{style}" x="{LABELS}" y="{y}" width="{width:.1f}" height="16"/>')
        parts.append(f'<path class="range" d="M{x(bar.low):.1f} {y + 8}H{x(bar.high):.1f}"/>')
        parts.append(f'<text x="{x(bar.high) + 6:.1f}" y="{y + 13}">{bar.value:.3g} {escape(unit)}</text>')
    return _svg(title, ROW * len(bars) + 14, parts)


@dataclass(frozen=True)
class Curve:
    """Means and their intervals at the positions 1, 2, ..."""

    means: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]


def curve_chart(title: str, panels: Mapping[str, tuple[Curve, Curve]], names: tuple[str, str], x_label: str) -> str:
    """Return an SVG with a panel for each task: two curves in the bands of their intervals.

    :param title: Accessible name of the picture.
    :param panels: The two curves by name of the task.
    :param names: Names of the two curves; the second one is the peer.
    :param x_label: Meaning of the positions.
    """
    width, height, gap, top = 250, 180, 55, 50
    parts = []
    for index, name in enumerate(names):
        style = ("ours", "peer")[index]
        parts.append(f'<path class="line-{style}" d="M{50 + 160 * index} 14h30"/>')
        parts.append(f'<text x="{88 + 160 * index}" y="18">{escape(name)}</text>')
    for index, (task, curves) in enumerate(panels.items()):
        left = 50 + index * (width + gap)
        low = min(value for curve in curves for value in curve.lows)
        high = max(value for curve in curves for value in curve.highs)
        n_positions = len(curves[0].means)

        def point(
            position: int,
            value: float,
            left: int = left,
            low: float = low,
            high: float = high,
            n_positions: int = n_positions,
        ) -> str:
            x = left + width * position / (n_positions - 1)
            return f"{x:.1f} {top + height * (high - value) / (high - low):.1f}"

        parts.append(f'<text class="middle" x="{left + width / 2}" y="{top - 10}">{escape(task)}</text>')
        parts.append(f'<path class="axis" d="M{left} {top}v{height}h{width}"/>')
        for value in (low, high):
            y = top + height * (high - value) / (high - low)
            parts.append(f'<text class="end muted" x="{left - 5}" y="{y + 4:.1f}">{value:.0f}</text>')
        for position in range(n_positions):
            x = left + width * position / (n_positions - 1)
            parts.append(f'<text class="middle muted" x="{x:.1f}" y="{top + height + 16}">{position + 1}</text>')
        parts.append(
            f'<text class="middle muted" x="{left + width / 2}" y="{top + height + 34}">{escape(x_label)}</text>'
        )
        for style, curve in zip(("peer", "ours"), reversed(curves), strict=True):
            upper = [point(position, value) for position, value in enumerate(curve.highs)]
            lower = [point(position, value) for position, value in enumerate(curve.lows)]
            line = [point(position, value) for position, value in enumerate(curve.means)]
            parts.append(f'<path class="band-{style}" d="M{"L".join([*upper, *reversed(lower)])}Z"/>')
            parts.append(f'<path class="line-{style}" d="M{"L".join(line)}"/>')
    return _svg(title, top + height + 44, parts, 40 + len(panels) * (width + gap))


def _svg(title: str, height: float, parts: Sequence[str], width: int = WIDTH) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" role="img"'
    return "\n".join([f'{head} aria-label="{escape(title)}">', *parts, "</svg>\n"])


def _number(cell: str) -> float:
    """The first number of a cell."""
    return float(re.findall(r"[-+]?\d+(?:\.\d+)?", cell.replace("+", ""))[0])


def _spread(label: str, values: Sequence[float], is_ours: bool) -> Bar:
    return Bar(label, mean(values), min(values), max(values), is_ours)


def job_shop_chart(page: Path) -> str:
    """Gaps of each method, with the range over the four sizes."""
    bars = []
    for row in _table(page, "gaps"):
        method, *cells = list(row.values())[:5]
        bars.append(_spread(method, [_number(cell) for cell in cells], method.startswith("trained")))
    return value_chart("Gaps to the best known makespans: mean over four sizes, range over sizes", bars, "%")


def operations_chart(page: Path) -> str:
    """Excess costs of heuristics and trained policies, with their ranges over settings."""
    problems = {"lost_sales": "lost sales", "dual_sourcing": "dual sourcing", "criss_cross": "criss-cross network"}
    bars = []
    for name, problem in problems.items():
        rows = _table(page, name)
        by_policy: dict[str, list[float]] = {}
        for row in rows:
            for heuristic in re.split(r",\s(?=[a-z])", row["heuristics"]):
                found = re.fullmatch(r"(.*?)(?: \(.*\))? ([\d.]+)", heuristic)
                if found is not None:
                    excess = 100 * (float(found[2]) / _number(row["reference"]) - 1)
                    by_policy.setdefault(found[1].replace("_", " "), []).append(excess)
        bars += [_spread(f"{problem}: {policy}", values, False) for policy, values in by_policy.items()]
        bars.append(_spread(f"{problem}: trained", [_number(row["gap"]) for row in rows], True))
    return value_chart("Cost above the optimum: mean over settings, range over settings", bars, "%")


def imitation_chart(page: Path) -> str:
    """Worst epoch of fine-tuning beside the clone."""
    bars = []
    for row in _table(page, "fine_tuning"):
        share = _number(row["worst / clone"])
        bars.append(Bar(f"{row['algorithm']}, seed {row['seed']}", share, share, share))
    return value_chart("Return of the worst epoch of fine-tuning, in percent of the clone", bars, "%")


CHARTS = {"job_shop": job_shop_chart, "operations": operations_chart, "imitation": imitation_chart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path)
    for page in parser.parse_args().pages:
        page.with_suffix(".svg").write_text(CHARTS[page.stem](page), encoding="utf-8")


if __name__ == "__main__":
    main()
