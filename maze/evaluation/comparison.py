"""Policies side by side in the same episodes, and what that tells of their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from maze.core.utils.files import csv_text
from maze.report.estimates import Estimate, Values, interquartile_mean_interval, mean_interval

RETURN, LENGTH = "return", "steps"
"""Measures that every episode has; the others are its KPIs."""


@dataclass(frozen=True)
class PlayedEpisodes:
    """What a policy reached, or several trainings of it.

    :param name: What it is called.
    :param measures: Values `[n_trainings, n_episodes]` by name; a policy that was not trained counts as one training.
    """

    name: str
    measures: Mapping[str, Values]


class ComparedMeasure(NamedTuple):
    """One policy and one measure.

    :param policy: Name of the policy.
    :param measure: Name of the measure.
    :param mean: Mean over trainings and episodes.
    :param interquartile_mean: Mean of the middle half of them.
    :param difference: How much larger the mean is than that of the reference, in the same episodes.
    :param improvement: Probability of a better value than the reference's in the same episode; of measures without a
        goal, of a larger one.
    """

    policy: str
    measure: str
    mean: Estimate
    interquartile_mean: Estimate
    difference: Estimate | None
    improvement: Estimate | None


@dataclass(frozen=True)
class Comparison:
    """Policies in the same episodes.

    Intervals cover episodes and, of policies with several runs, runs; see :mod:`maze.report.estimates`. All policies
    play the same episodes, so that what makes an episode hard or easy cancels out of their differences.

    :param played: What the policies reached, all in the same episodes; the first one is the reference.
    :param minimized: Measures of which less is better.
    :param maximized: Measures of which more is better, unless they are minimized.
    """

    played: Sequence[PlayedEpisodes]
    minimized: Sequence[str] = ()
    maximized: Sequence[str] = (RETURN,)

    @property
    def measures(self) -> list[str]:
        """The measures that all policies have."""
        first, *others = self.played
        return [name for name in first.measures if all(name in other.measures for other in others)]

    @property
    def n_episodes(self) -> int:
        """How many episodes there are."""
        return int(next(iter(self.played[0].measures.values())).shape[1])

    @cached_property
    def table(self) -> list[ComparedMeasure]:
        """A row for each measure and policy."""
        return [row for measure in self.measures for row in self._rows(measure)]

    def rows_of(self, measure: str) -> list[ComparedMeasure]:
        """The rows of one measure, in the order of the policies."""
        return [row for row in self.table if row.measure == measure]

    def is_told_apart(self, row: ComparedMeasure) -> bool:
        """Whether the interval of the difference from the reference leaves out zero."""
        return row.difference is not None and (row.difference.low > 0 or row.difference.high < 0)

    def goal(self, measure: str) -> str:
        """In words, whether more of a measure counts as better, for headings."""
        if measure in self.minimized:
            return " (less is better)"
        return " (more is better)" if measure in self.maximized else ""

    def improvement_name(self, measure: str) -> str:
        """Heading of the probability of improvement."""
        return "P(better)" if self.goal(measure) else "P(more)"

    def _cells(self, row: ComparedMeasure) -> tuple[str, ...]:
        cells = (row.policy, _short(row.mean.value), _interval(row.mean), _short(row.interquartile_mean.value))
        if row.difference is None or row.improvement is None:
            return (*cells, "", "", "")
        difference = f"{row.difference.value:+.5g}{'*' * self.is_told_apart(row)}"
        return (*cells, difference, _interval(row.difference), f"{row.improvement.value:.2f}")

    def _rows(self, measure: str) -> Iterator[ComparedMeasure]:
        reference = self.played[0].measures[measure]
        sign = -1.0 if measure in self.minimized else 1.0
        for index, played in enumerate(self.played):
            values = played.measures[measure]
            yield ComparedMeasure(
                played.name,
                measure,
                Estimate.of(mean_interval(values)),
                Estimate.of(interquartile_mean_interval(values)),
                Estimate.of(mean_interval(values, reference)) if index else None,
                _improvement(sign * values, sign * reference) if index else None,
            )

    def as_csv(self) -> str:
        """The table, a line for each measure and policy."""
        names = ("mean", "interquartile_mean", "difference", "improvement")
        header = [column for name in names for column in (name, f"{name}_low", f"{name}_high")]
        lines: list[list[object]] = [["policy", "measure", *header]]
        for row in self.table:
            estimates = [getattr(row, name) for name in names]
            cells = [repr(float(end)) for each in estimates if each is not None for end in each]
            lines.append([row.policy, row.measure, *cells, *[""] * (len(header) - len(cells))])
        return csv_text(lines)

    def episodes_as_csv(
        self, facts: Sequence[tuple[object, ...]], names: Sequence[str] = ("env_seed", "agent_seed")
    ) -> str:
        """The episodes, a line for each training and episode.

        :param facts: What else is known of each episode, by default the seeds of environment and agent.
        :param names: Names of the facts.
        """
        lines: list[list[object]] = [["policy", "training", "episode", *names, *self.measures]]
        for played in self.played:
            n_trainings = next(iter(played.measures.values())).shape[0]
            for training in range(n_trainings):
                for episode, known in enumerate(facts):
                    values = [repr(float(played.measures[name][training, episode])) for name in self.measures]
                    lines.append([played.name, training, episode, *known, *values])
        return csv_text(lines)

    def text(self) -> str:
        """The table for the console, measure by measure."""
        reference = self.played[0].name
        header = ("policy", "mean", "95 % interval", "IQM", f"difference from {reference}", "95 % interval")
        parts = []
        for measure in self.measures:
            rows = [(*header, self.improvement_name(measure)), *map(self._cells, self.rows_of(measure))]
            parts += [f"{measure}{self.goal(measure)}", *aligned(rows), ""]
        parts.append(f"{self.n_episodes} episodes, the same for all; * the interval of the difference leaves out 0.")
        return "\n".join(parts)


def _improvement(ours: Values, theirs: Values) -> Estimate:
    """Probability that one is better in an episode, over all pairs of runs; ties count half."""
    pairs = (ours[:, np.newaxis] > theirs) + 0.5 * (ours[:, np.newaxis] == theirs)
    # What is subtracted has the mean 0, and the differences between the runs of the other policy.
    return Estimate.of(mean_interval(pairs.mean(1), pairs.mean((0, 1)) - pairs.mean(0), (0.0, 1.0)))


def _short(value: float) -> str:
    return f"{value:.5g}"


def _interval(estimate: Estimate) -> str:
    return f"[{estimate.low:.4g}, {estimate.high:.4g}]" if estimate.is_known else ""


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table for the console, whose first column is a name.

    :param rows: Cells, the heading first.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
