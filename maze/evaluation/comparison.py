"""Comparison of policies on the same episodes: estimates of their differences, in all episodes and by context."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.env.context import CONTEXT
from maze.core.log_stats.log_stats import LogStats, LogStatsKey
from maze.core.utils.files import aligned, csv_text
from maze.core.utils.stats_utils import Estimate, iqm_interval, mean_interval, quantile_interval, tail_contributions
from maze.report.page import Cell, MarkedNumber, Page, number_text, page_section, table

RETURN, LENGTH = "return", "steps"
"""Measures of every episode; the others are KPIs."""


@dataclass(frozen=True)
class PlayedEpisodes:
    """Measures of a policy in a set of episodes.

    :param name: Name of the policy.
    :param measures: Values `[n_runs, n_episodes]` by name; an untrained policy counts as one run.
    """

    name: str
    measures: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, name: str, runs: Sequence[Sequence[Mapping[str, float]]]) -> PlayedEpisodes:
        """Collect the measures that all episodes of all runs have.

        :param name: Name of the policy.
        :param runs: Measures of each episode of each run.
        """
        common = [measure for measure in runs[0][0] if all(measure in each for run in runs for each in run)]
        values = {name: np.array([[each[name] for each in run] for run in runs], np.float64) for name in common}
        return cls(name, values)

    def by_instance(self, n_instances: int) -> PlayedEpisodes:
        """Average the episodes of each instance, which are not independent; episode `i` has instance `i mod n`.

        :param n_instances: Number of instances, a divisor of the number of episodes.
        :raises ValueError: It is no divisor.
        """
        split = {name: values.reshape(len(values), -1, n_instances) for name, values in self.measures.items()}
        return PlayedEpisodes(self.name, {name: values.mean(1) for name, values in split.items()})

    def chosen(self, episodes: Any) -> PlayedEpisodes:
        """Return the measures in some of the episodes.

        :param episodes: A slice of the episodes, or an array of their indices.
        """
        return PlayedEpisodes(self.name, {name: values[:, episodes] for name, values in self.measures.items()})

    def tails(self, level: float, minimized: Sequence[str]) -> PlayedEpisodes:
        """Return the contributions of the episodes to the CVaR of each measure: their mean is the CVaR.

        :param level: Share of the episodes that are the worst.
        :param minimized: Measures whose largest values are the worst.
        """
        signs = {name: -1.0 if name in minimized else 1.0 for name in self.measures}
        tails = {name: sign * tail_contributions(sign * self.measures[name], level) for name, sign in signs.items()}
        return PlayedEpisodes(self.name, tails)


def marked(name: str, policy: Any) -> str:
    """Return the name of a policy, with a mark if it plans with the true future of its episodes."""
    return f"{name} (clairvoyant)" if getattr(policy, "clairvoyant", False) else name


class ComparedMeasure(NamedTuple):
    """Estimates of one measure of one policy.

    :param policy: Name of the policy.
    :param measure: Name of the measure.
    :param mean: Mean over runs and episodes.
    :param interquartile_mean: Mean of the middle half of the values.
    :param difference: Difference of the mean from that of the reference policy, in the same episodes.
    :param improvement: Probability of a better value than the reference policy's in the same episode; for measures
        without a goal, of a larger value.
    """

    policy: str
    measure: str
    mean: Estimate
    interquartile_mean: Estimate
    difference: Estimate | None
    improvement: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """Comparison of policies on the same episodes.

    Intervals cover the variation over episodes and, for policies with several runs, over runs; see
    :mod:`maze.core.utils.stats_utils`. The same episodes for all policies (common random numbers) reduce the variance
    of the differences.

    :param played: Measures of the policies in the same episodes; the first policy is the reference.
    :param minimized: Measures for which less is better.
    :param maximized: Measures for which more is better, unless they are minimized.
    :param durations: Measures that are never negative: neither are the intervals of their means.
    """

    played: Sequence[PlayedEpisodes]
    minimized: Sequence[str] = ()
    maximized: Sequence[str] = (RETURN,)
    durations: Sequence[str] = (LENGTH,)

    @property
    def measures(self) -> list[str]:
        """Measures that all policies have, without the values of contexts."""
        first, *others = self.played
        common = [name for name in first.measures if all(name in other.measures for other in others)]
        return [name for name in common if not name.startswith(f"{CONTEXT}/")]

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return int(next(iter(self.played[0].measures.values())).shape[1])

    @cached_property
    def table(self) -> list[ComparedMeasure]:
        """One row for each measure and policy."""
        return [row for measure in self.measures for row in self._rows(measure)]

    def rows_of(self, measure: str) -> list[ComparedMeasure]:
        """Return the rows of one measure, in the order of the policies."""
        return [row for row in self.table if row.measure == measure]

    def is_significant(self, row: ComparedMeasure) -> bool:
        """Return whether the interval of the difference from the reference excludes zero.

        :param row: A row of :attr:`table`; false for those of the reference, and where there is no interval.
        """
        return row.difference is not None and (row.difference.low > 0 or row.difference.high < 0)

    def goal(self, measure: str) -> str:
        """Return the goal of a measure for headings; empty: none is stated."""
        if measure in self.minimized:
            return " (less is better)"
        return " (more is better)" if measure in self.maximized else ""

    def improvement_name(self, measure: str) -> str:
        """Return the heading of the probability of improvement."""
        return "P(better)" if self.goal(measure) else "P(more)"

    def _cells(self, row: ComparedMeasure) -> tuple[str, ...]:
        cells = (row.policy, _short(row.mean.value), _interval(row.mean), _short(row.interquartile_mean.value))
        if row.difference is None or row.improvement is None:
            return (*cells, "", "", "")
        difference = f"{row.difference.value:+.5g}{'*' * self.is_significant(row)}"
        return (*cells, difference, _interval(row.difference), f"{row.improvement.value:.2f}")

    def _rows(self, measure: str) -> Iterator[ComparedMeasure]:
        reference = self.played[0].measures[measure]
        sign = -1.0 if measure in self.minimized else 1.0
        least = 0.0 if measure in self.durations else -math.inf
        for index, played in enumerate(self.played):
            values = played.measures[measure]
            yield ComparedMeasure(
                played.name,
                measure,
                Estimate.of(mean_interval(values)).at_least(least),
                Estimate.of(iqm_interval(values)).at_least(least),
                Estimate.of(mean_interval(values, reference)) if index else None,
                _improvement(sign * values, sign * reference) if index else None,
            )

    def as_csv(self) -> str:
        """Return the table, one line for each measure and policy."""
        names = ("mean", "interquartile_mean", "difference", "improvement")
        rows = [((row.policy, row.measure), row[2:]) for row in self.table]
        return _estimates_csv(("policy", "measure"), names, rows)

    def episodes_as_csv(
        self, facts: Sequence[tuple[object, ...]], names: Sequence[str] = ("env_seed", "agent_seed")
    ) -> str:
        """Return the episodes, one line for each run and episode.

        :param facts: Further columns of each episode, by default the seeds of environment and agent.
        :param names: Names of these columns.
        """
        lines: list[list[object]] = [["policy", "training", "episode", *names, *self.measures]]
        for played in self.played:
            for run in range(len(next(iter(played.measures.values())))):
                for episode, known in enumerate(facts):
                    values = [repr(float(played.measures[name][run, episode])) for name in self.measures]
                    lines.append([played.name, run, episode, *known, *values])
        return csv_text(lines)

    def text(self) -> str:
        """Return the table for the console, measure by measure."""
        reference = self.played[0].name
        header = ("policy", "mean", "95 % interval", "IQM", f"difference from {reference}", "95 % interval")
        parts = []
        for measure in self.measures:
            rows = [(*header, self.improvement_name(measure)), *map(self._cells, self.rows_of(measure))]
            parts += [f"{measure}{self.goal(measure)}", *aligned(rows), ""]
        parts.append(f"{self.n_episodes} episodes, the same for all; * the interval of the difference excludes 0.")
        return "\n".join(parts)


def _estimates_csv(
    heading: Sequence[str], names: Sequence[str], rows: Sequence[tuple[Sequence[object], Sequence[Estimate | None]]]
) -> str:
    """Return a table of estimates, three columns each.

    :param heading: Names of the first columns.
    :param names: Names of the estimates.
    :param rows: The first cells and the estimates of each row.
    """
    lines: list[list[object]] = [[*heading, *(f"{name}{end}" for name in names for end in ("", "_low", "_high"))]]
    for first, estimates in rows:
        ends = (end for each in estimates for end in (each or ("", "", "")))
        lines.append([*first, *(end if end == "" else repr(float(end)) for end in ends)])
    return csv_text(lines)


def _improvement(ours: np.ndarray, theirs: np.ndarray) -> Estimate:
    """Estimate the probability that ours is better in an episode, over all pairs of runs; ties count half."""
    pairs = (ours[:, np.newaxis] > theirs) + 0.5 * (ours[:, np.newaxis] == theirs)
    pairs[np.isnan(ours[:, np.newaxis]) | np.isnan(theirs)] = np.nan  # neither better nor worse
    # The subtrahend has mean 0 and contributes the variation between the runs of the other policy.
    return Estimate.of(mean_interval(pairs.mean(1), pairs.mean((0, 1)) - pairs.mean(0), (0.0, 1.0)))


def _short(value: float) -> str:
    return f"{value:.5g}"


def _interval(estimate: Estimate) -> str:
    return f"[{estimate.low:.4g}, {estimate.high:.4g}]" if estimate.is_known else ""


def measures_of(stats: LogStats) -> dict[str, float]:
    """Extract return, length and KPIs of an episode from its statistics.

    :param stats: Statistics on the level of episodes.
    :return: Numbers by :data:`RETURN`, :data:`LENGTH` (environment steps) and names of KPIs.
    """
    of_reward = {RETURN: "sum", LENGTH: "count"}
    measures = {name: float(stats[LogStatsKey(BaseEnvEvents.reward, it, None)]) for name, it in of_reward.items()}
    kpis = ((key.group, value) for key, value in stats.items() if key.event is BaseEnvEvents.kpi)
    return {**measures, **{str(group[0]): float(value) for group, value in kpis if group}}


# -- the page ----------------------------------------------------------------------------------------------------------

_WIDTH, _SIDE, _NAME, _ROW, _BOTTOM = 500, 14, 18, 48, 24
"""Width of a figure, horizontal margin, height of a name, of a row, and of the axis."""
_N_DOTS = 200


def comparison_page(comparison: Comparison, written: datetime, further: Sequence[str] = ()) -> Page:
    """Build the HTML report: for each measure the policies with intervals, and their differences from the first one.

    :param comparison: The comparison.
    :param written: Time that the page shows.
    :param further: Further sections.
    """
    names = [played.name for played in comparison.played]
    return Page(
        title=" / ".join(names) if len(names) <= 4 else f"{len(names)} policies",
        subtitle=f"{comparison.n_episodes} episodes, the same for all policies; differences are from {names[0]}",
        note=f"written {written:%Y-%m-%d %H:%M:%S}; 95 % intervals over episodes and runs; "
        "IQM: mean of the middle half (Agarwal et al. 2021)",
        sections=[page_section("Overview", _overview(comparison)), *further, *_measures(comparison)],
    )


def _overview(comparison: Comparison) -> str:
    of_policies = zip(*map(comparison.rows_of, comparison.measures), strict=True)
    rows: list[list[Cell]] = [
        [found[0].policy, *(MarkedNumber(each.mean.value, _verdict(comparison, each)) for each in found)]
        for found in of_policies
    ]
    marks = "▲ better, ▼ worse, * different from the first policy: the interval of the difference excludes 0"
    return table(["policy", *comparison.measures], rows, f"Means over episodes; {marks}")


def _verdict(comparison: Comparison, row: ComparedMeasure) -> str:
    if row.difference is None or not comparison.is_significant(row):
        return ""
    if not comparison.goal(row.measure):
        return " *"
    is_less = row.difference.value < 0
    return " ▲" if is_less == (row.measure in comparison.minimized) else " ▼"


def _measures(comparison: Comparison) -> Iterator[str]:
    header = ("policy", "mean", "95 %", "IQM", "95 % of IQM", "difference", "95 % of difference")
    for measure in comparison.measures:
        dots = [played.measures[measure].mean(axis=0) for played in comparison.played]
        estimates = comparison.rows_of(measure)
        figures = intervals_figure(
            "Episodes, and their mean with its interval", [(row.policy, row.mean) for row in estimates], dots, None
        )
        if differences := [(row.policy, row.difference) for row in estimates if row.difference is not None]:
            title = f"Difference from {comparison.played[0].name} in the same episode"
            figures += intervals_figure(title, differences, [each - dots[0] for each in dots[1:]], 0.0)
        yield page_section(
            f"{measure}{comparison.goal(measure)}",
            f'<div class="pair">{figures}</div>\n',
            facts=table(
                (*header, comparison.improvement_name(measure), "95 % of P"),
                map(_row, estimates),
                f"{measure}: means, and differences from {comparison.played[0].name}",
            ),
        )


def _row(row: ComparedMeasure) -> list[Cell]:
    return [row.policy, *_estimate_cells(row.mean, row.interquartile_mean, row.difference, row.improvement)]


def _estimate_cells(*estimates: Estimate | None) -> Iterator[Cell]:
    """Yield the value and the interval of each estimate; empty cells for `None`."""
    for estimate in estimates:
        yield from (None, "") if estimate is None else (estimate.value, _range_text(estimate))


def _range_text(estimate: Estimate) -> str:
    return f"{number_text(estimate.low)} to {number_text(estimate.high)}" if estimate.is_known else ""


def intervals_figure(
    title: str, rows: Sequence[tuple[str, Estimate]], dots: Sequence[np.ndarray], line: float | None
) -> str:
    """Draw a row for each estimate: its interval as a bar, and single values as dots.

    :param title: Caption.
    :param rows: Names and estimates.
    :param dots: Values of the episodes of each row, `[n]`, possibly none.
    :param line: Position of a vertical line; `None`: no line.
    """
    values = np.concatenate([*dots, [end for _, estimate in rows for end in estimate], [] if line is None else [line]])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not high > low:
        low, high = low - 0.5, high + 0.5
    height = _ROW * len(rows) + _BOTTOM

    def x(value: float) -> float:
        return _SIDE + (_WIDTH - 2 * _SIDE) * (value / 2 - low / 2) / (high / 2 - low / 2)  # halves do not overflow

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
        is_finite = np.isfinite(estimate.value)
        shown_name = name if len(name) <= 40 else f"{name[:39]}…"
        shown_name += "" if is_finite else f": {number_text(estimate.value)}"
        parts.append(f'<text x="{_SIDE}" y="{_ROW * index + _NAME - 4}">{html.escape(shown_name)}</text>')
        shown = points[:: max(1, -(-len(points) // _N_DOTS))]
        # Fixed vertical offsets, so that equal values do not hide each other.
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
        if is_finite:
            parts.append(
                f'<circle cx="{x(estimate.value):.1f}" cy="{y}" r="5" style="fill: {colour}; stroke: var(--card)"/>'
            )
    label = "; ".join(f"{name} {number_text(estimate.value)}" for name, estimate in rows)
    return (
        f'<figure><figcaption>{html.escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(label)}">{"".join(parts)}</svg></figure>'
    )


_TAIL_HEADER = ("level", "policy", "quantile", "95 %", "CVaR", "95 % of CVaR", "difference", "95 % of difference")


@dataclass(frozen=True)
class TailComparison:
    """Comparison of the worst episodes, by the measures that have a goal.

    :param comparison: The comparison of all episodes.
    :param levels: Shares of the episodes that are the worst, such as 0.1.
    """

    comparison: Comparison
    levels: Sequence[float]

    def __bool__(self) -> bool:
        """Return whether there are levels."""
        return bool(self.levels)

    @cached_property
    def _tails(self) -> list[Comparison]:
        """The comparison of the contributions to the CVaR at each level."""
        played, minimized = self.comparison.played, self.comparison.minimized
        return [Comparison([each.tails(level, minimized) for each in played]) for level in self.levels]

    def rows(self, measure: str) -> Iterator[tuple[float, Estimate, ComparedMeasure]]:
        """Yield the estimates of a measure in the worst episodes, level by level.

        :return: The level; the least bad of their values (value at risk); their mean (conditional value at risk) and
            its difference from that of the reference policy.
        """
        sign = -1.0 if measure in self.comparison.minimized else 1.0
        for level, tails in zip(self.levels, self._tails, strict=True):
            for played, row in zip(self.comparison.played, tails.rows_of(measure), strict=True):
                value, *ends = (sign * float(end) for end in quantile_interval(sign * played.measures[measure], level))
                yield level, Estimate(value, *sorted(ends)), row

    @property
    def measures(self) -> list[str]:
        """Measures with a goal."""
        return [measure for measure in self.comparison.measures if self.comparison.goal(measure)]

    def as_csv(self) -> str:
        """Return the table, one line for each measure, level and policy."""
        found = ((measure, *each) for measure in self.measures for each in self.rows(measure))
        rows = [((m, level, row.policy), (quantile, row.mean, row.difference)) for m, level, quantile, row in found]
        return _estimates_csv(("measure", "level", "policy"), ("quantile", "cvar", "difference"), rows)

    def text(self) -> str:
        """Return the table for the console, measure by measure."""
        parts = []
        for measure in self.measures:
            rows = [_TAIL_HEADER, *(tuple(map(_cell_text, _tail_cells(*row))) for row in self.rows(measure))]
            parts += [f"{measure}, worst episodes", *aligned(rows), ""]
        return "\n".join(parts)

    def section(self) -> str:
        """Return a section of the report."""
        tables = [
            table(_TAIL_HEADER, [_tail_cells(*row) for row in self.rows(measure)], f"{measure}: worst episodes")
            for measure in self.measures
        ]
        return page_section("Worst episodes", "".join(tables))


def _tail_cells(level: float, quantile: Estimate, row: ComparedMeasure) -> list[Cell]:
    return [f"{level:g}", row.policy, *_estimate_cells(quantile, row.mean, row.difference)]


def _cell_text(cell: Cell) -> str:
    return "" if cell is None else _short(cell) if isinstance(cell, float) else str(cell)


_MOST_CONTEXTS = 400
"""Largest number of contexts of a table; more are values of intervals, of which episodes have one each."""


class ContextComparison:
    """Comparison of policies in each context.

    :param comparison: The comparison of all episodes.
    :param texts: Texts of parameters that are stored as an index, by parameter.
    """

    def __init__(self, comparison: Comparison, texts: Mapping[str, Sequence[Any]] | None = None) -> None:
        self.comparison = comparison
        of_reference = comparison.played[0].measures
        self.names = [name.removeprefix(f"{CONTEXT}/") for name in of_reference if name.startswith(f"{CONTEXT}/")]
        """Names of the parameters."""
        columns = np.array([of_reference[f"{CONTEXT}/{name}"][0] for name in self.names])
        columns = columns.reshape(-1, comparison.n_episodes)  # also without any
        contexts, self._context_of = np.unique(columns, axis=1, return_inverse=True)
        self._labels = [
            tuple(self._label(name, value, texts or {}) for name, value in zip(self.names, values, strict=True))
            for values in contexts.T.tolist()
        ]

    def __bool__(self) -> bool:
        """Return whether episodes have contexts, several of them and not one each."""
        return 1 < len(self._labels) <= min(_MOST_CONTEXTS, self.comparison.n_episodes // 2)

    @cached_property
    def _parts(self) -> list[tuple[tuple[str, ...], Comparison]]:
        """The values of each context, and the comparison in its episodes."""
        of_contexts = (np.flatnonzero(self._context_of.ravel() == number) for number in range(len(self._labels)))
        played = ([each.chosen(episodes) for each in self.comparison.played] for episodes in of_contexts)
        return [(values, Comparison(part)) for values, part in zip(self._labels, played, strict=True)]

    def rows(self, measure: str) -> Iterator[tuple[tuple[str, ...], ComparedMeasure]]:
        """Yield the values and the estimates of each context, policy by policy."""
        return ((values, row) for values, part in self._parts for row in part.rows_of(measure))

    def as_csv(self) -> str:
        """Return the table, one line for each context, measure and policy."""
        found = (each for measure in self.comparison.measures for each in self.rows(measure))
        rows = [((*values, row.measure, row.policy), (row.mean, row.difference)) for values, row in found]
        return _estimates_csv((*self.names, "measure", "policy"), ("mean", "difference"), rows)

    def section(self) -> str:
        """Return a section of the report: for each measure with a goal a heat map of differences; empty without any."""
        if len(self.comparison.played) == 1:
            return ""
        maps = [self._heat_map(measure) for measure in self.comparison.measures if self.comparison.goal(measure)]
        note = "Differences from the first policy; green is better, red is worse, * the interval excludes 0."
        return page_section("By context", f"<p>{note}</p>\n{''.join(maps)}")

    def _heat_map(self, measure: str) -> str:
        """Return a table with a row for each context and a column for each policy."""
        rows = self.rows(measure)
        differences = [(values, row.difference) for values, row in rows if row.difference is not None]
        sign = -1.0 if measure in self.comparison.minimized else 1.0
        sizes = [abs(estimate.value) for _, estimate in differences if np.isfinite(estimate.value)]
        scale = sign / (max(sizes, default=1.0) or 1.0)
        lines: dict[tuple[str, ...], list[str]] = {}
        for values, estimate in differences:
            lines.setdefault(values, []).append(_heat_cell(estimate, scale))
        columns = [*self.names, *(played.name for played in self.comparison.played[1:])]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
        body = "".join(
            f"<tr>{''.join(f'<th>{html.escape(value)}</th>' for value in values)}{''.join(cells)}</tr>"
            for values, cells in lines.items()
        )
        return (
            f'<div class="wide"><table><caption>{html.escape(measure)}</caption><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>\n"
        )

    @staticmethod
    def _label(name: str, value: float, texts: Mapping[str, Sequence[Any]]) -> str:
        return str(texts[name][int(value)]) if name in texts else f"{value:.6g}"


def texts_of(context: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return the texts of a configured context, by parameter.

    :param context: The configuration (`env.context`); `None`: there is none.
    """
    listed = {name: list(given) for name, given in (context or {}).items() if not isinstance(given, Mapping)}
    return {name: values for name, values in listed.items() if isinstance(values[0], str)}


def _heat_cell(estimate: Estimate, scale: float) -> str:
    share = 0.0 if np.isnan(estimate.value) else max(-1.0, min(1.0, estimate.value * scale))
    colour = "46, 160, 67" if share > 0 else "218, 54, 51"
    mark = " *" if estimate.low > 0 or estimate.high < 0 else ""
    text = html.escape(number_text(float(f"{estimate.value:.3g}")))
    return f'<td style="background: rgba({colour}, {0.6 * abs(share):.2f})">{text}{mark}</td>'
