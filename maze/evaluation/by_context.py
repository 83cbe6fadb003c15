"""Comparison by context: the same estimates for each combination of the parameters that episodes differ in."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.context import CONTEXT
from maze.core.utils.files import csv_text
from maze.evaluation.comparison import Comparison, PlayedEpisodes
from maze.report.estimates import Estimate, mean_interval
from maze.report.page import number_text, page_section

_MOST_CONTEXTS = 400
"""Largest number of contexts of a table; more are values of intervals, of which episodes have one each."""


class ContextRow(NamedTuple):
    """Estimates of one measure of one policy in the episodes of one context.

    :param values: Values of the context.
    :param measure: Name of the measure.
    :param policy: Name of the policy.
    :param mean: Mean over runs and episodes.
    :param difference: Difference of the mean from that of the reference policy; `None`: it is the reference.
    """

    values: tuple[str, ...]
    measure: str
    policy: str
    mean: Estimate
    difference: Estimate | None


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
        columns = np.zeros((len(self.names), comparison.n_episodes))
        for index, name in enumerate(self.names):
            columns[index] = of_reference[f"{CONTEXT}/{name}"][0]
        contexts, self._context_of = np.unique(columns, axis=1, return_inverse=True)
        self._labels = [
            tuple(self._label(name, value, texts or {}) for name, value in zip(self.names, values, strict=True))
            for values in contexts.T.tolist()
        ]

    def __bool__(self) -> bool:
        """Whether episodes have contexts, several of them and not one each."""
        return 1 < len(self._labels) <= min(_MOST_CONTEXTS, self.comparison.n_episodes // 2)

    def rows(self, measure: str) -> Iterator[ContextRow]:
        """Yield the estimates of a measure, context by context.

        :param measure: The measure.
        """
        reference, *_ = self.comparison.played
        for number, values in enumerate(self._labels):
            episodes = np.flatnonzero(self._context_of.ravel() == number)
            ours = reference.measures[measure][:, episodes]
            for played in self.comparison.played:
                theirs = played.measures[measure][:, episodes]
                is_reference = played is reference
                difference = None if is_reference else Estimate.of(mean_interval(theirs, ours))
                yield ContextRow(values, measure, played.name, Estimate.of(mean_interval(theirs)), difference)

    def as_csv(self) -> str:
        """Return the table, one line for each context, measure and policy."""
        parts = ("mean", "mean_low", "mean_high", "difference", "difference_low", "difference_high")
        lines: list[list[object]] = [[*self.names, "measure", "policy", *parts]]
        for measure in self.comparison.measures:
            for row in self.rows(measure):
                ends = [*row.mean, *(row.difference or ("", "", ""))]
                cells = [repr(float(end)) if end != "" else "" for end in ends]
                lines.append([*row.values, row.measure, row.policy, *cells])
        return csv_text(lines)

    def section(self) -> str:
        """Return a section of the report: for each measure with a goal and each policy a heat map of differences."""
        maps = []
        for measure in self.comparison.measures:
            if self.comparison.goal(measure):
                rows = list(self.rows(measure))
                maps += [self._heat_maps(measure, played, rows) for played in self.comparison.played[1:]]
        note = "Differences from the first policy; green is better, red is worse, * the interval excludes 0."
        return page_section("By context", f"<p>{note}</p>\n{''.join(maps)}")

    def _heat_maps(self, measure: str, played: PlayedEpisodes, rows: Sequence[ContextRow]) -> str:
        """Heat maps over the two parameters with the most values, one for each combination of the others."""
        found = {row.values: row.difference for row in rows if row.policy == played.name and row.difference is not None}
        values = [sorted({label[index] for label in found}, key=_order) for index in range(len(self.names))]
        first, *more = sorted(range(len(self.names)), key=lambda index: -len(values[index]))
        second, others = more[:1], sorted(more[1:])
        sign = -1.0 if measure in self.comparison.minimized else 1.0
        scale = sign / (max(abs(estimate.value) for estimate in found.values()) or 1.0)
        maps = []
        for rest in product(*(values[index] for index in others)):
            fixed = dict(zip(others, rest, strict=True))
            columns = [{**fixed, **dict.fromkeys(second, value)} for value in (values[second[0]] if second else [""])]
            lines = []
            for value in values[first]:
                labels = [{**column, first: value} for column in columns]
                keys = [tuple(label[index] for index in range(len(self.names))) for label in labels]
                cells = "".join(_heat_cell(found.get(key), scale) for key in keys)
                lines.append(f"<tr><th>{html.escape(value)}</th>{cells}</tr>")
            heads = "".join(f"<th>{html.escape(column[second[0]])}</th>" for column in columns if second)
            axes = [f"{self.names[first]} by row", *(f"{self.names[index]} by column" for index in second)]
            axes += [f"{self.names[index]} {value}" for index, value in fixed.items()]
            caption = f"{measure} of {played.name}: {', '.join(axes)}"
            maps.append(
                f'<div class="wide"><table><caption>{html.escape(caption)}'
                f"</caption><thead><tr><th></th>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>\n"
            )
        return "".join(maps)

    @staticmethod
    def _label(name: str, value: float, texts: Mapping[str, Sequence[Any]]) -> str:
        return str(texts[name][int(value)]) if name in texts else f"{value:.6g}"


def texts_of(context: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """Return the texts of a configured context, by parameter.

    :param context: The configuration (`env.context`); `None`: there is none.
    """
    listed = {name: list(given) for name, given in (context or {}).items() if not isinstance(given, Mapping)}
    return {name: values for name, values in listed.items() if isinstance(values[0], str)}


def _order(label: str) -> tuple[float, str]:
    try:
        return float(label), label
    except ValueError:
        return 0.0, label


def _heat_cell(estimate: Estimate | None, scale: float) -> str:
    if estimate is None:
        return "<td></td>"
    share = max(-1.0, min(1.0, estimate.value * scale))
    colour = "46, 160, 67" if share > 0 else "218, 54, 51"
    mark = " *" if estimate.low > 0 or estimate.high < 0 else ""
    text = html.escape(number_text(float(f"{estimate.value:.3g}")))
    return f'<td style="background: rgba({colour}, {0.6 * abs(share):.2f})">{text}{mark}</td>'
