"""Policies side by side in the same episodes, and what that tells of their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from maze.core.utils.files import csv_text
from maze.report.estimates import CONFIDENCE, N_RESAMPLES, Estimate, Values, interquartile_mean, mean

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
    :param improvement: How probable it is that it is better than the reference in the same episode.
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

    Intervals come from a bootstrap that draws trainings and episodes again. All policies get the same episodes in each
    draw, so that what makes an episode hard or easy cancels out of their differences.

    :param played: What the policies reached, all in the same episodes; the first one is the reference.
    :param minimized: Measures of which less is better.
    :param seed: Of the bootstrap.
    :param without_goal: Measures of which neither more nor less is better, unless they are minimized.
    """

    played: Sequence[PlayedEpisodes]
    minimized: Sequence[str] = ()
    seed: int = 0
    without_goal: Sequence[str] = (LENGTH,)

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
        if measure in self.without_goal and measure not in self.minimized:
            return ""
        return f" ({'less' if measure in self.minimized else 'more'} is better)"

    def _cells(self, row: ComparedMeasure) -> tuple[str, ...]:
        cells = (row.policy, _short(row.mean.value), _interval(row.mean), _short(row.interquartile_mean.value))
        if row.difference is None or row.improvement is None:
            return (*cells, "", "", "")
        difference = f"{row.difference.value:+.5g}{'*' * self.is_told_apart(row)}"
        return (*cells, difference, _interval(row.difference), f"{row.improvement.value:.2f}")

    def _rows(self, measure: str) -> Iterator[ComparedMeasure]:
        rng = np.random.default_rng(self.seed)
        episodes = rng.integers(self.n_episodes, size=(N_RESAMPLES, self.n_episodes))
        reference = self.played[0].measures[measure]
        drawn_reference = _drawn(reference, episodes, rng)
        sign = -1.0 if measure in self.minimized else 1.0
        for index, played in enumerate(self.played):
            values = played.measures[measure]
            drawn = drawn_reference if index == 0 else _drawn(values, episodes, rng)
            difference = improvement = None
            if index:
                difference = _estimate(values.mean() - reference.mean(), _means(drawn) - _means(drawn_reference))
                wins = _wins(sign * values, sign * reference)
                improvement = _estimate(wins.mean(), wins[episodes].mean(axis=1))
            yield ComparedMeasure(
                played.name,
                measure,
                _estimate(float(mean(values.ravel())), _means(drawn)),
                _estimate(float(interquartile_mean(values.ravel())), _robust_means(drawn)),
                difference,
                improvement,
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
        header = (
            "policy",
            "mean",
            "95 % interval",
            "IQM",
            f"difference from {reference}",
            "95 % interval",
            "P(better)",
        )
        parts = []
        for measure in self.measures:
            rows = [header, *(self._cells(row) for row in self.rows_of(measure))]
            parts += [f"{measure}{self.goal(measure)}", *aligned(rows), ""]
        parts.append(f"{self.n_episodes} episodes, the same for all; * the interval of the difference leaves out 0.")
        return "\n".join(parts)


def _drawn(values: Values, episodes: Values, rng: np.random.Generator) -> Values:
    """Values `[n_resamples, n_trainings, n_episodes]` of episodes, and of trainings, that are drawn again."""
    n_trainings = values.shape[0]
    drawn: Values = values[:, episodes].transpose(1, 0, 2)
    if n_trainings == 1:
        return drawn
    trainings = rng.integers(n_trainings, size=(len(episodes), n_trainings))
    return np.asarray(np.take_along_axis(drawn, trainings[:, :, np.newaxis], axis=1))


def _means(drawn: Values) -> Values:
    return np.asarray(drawn.mean(axis=(1, 2)))


def _robust_means(drawn: Values) -> Values:
    return interquartile_mean(drawn.reshape(len(drawn), -1))


def _wins(ours: Values, theirs: Values) -> Values:
    """How often one is better in each episode `[n_episodes]`, over all pairs of trainings; ties count half."""
    pairs = (ours[:, np.newaxis] > theirs) + 0.5 * (ours[:, np.newaxis] == theirs)
    return np.asarray(pairs.mean(axis=(0, 1)))


def _estimate(value: float, drawn: Values) -> Estimate:
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(float(value), float(low), float(high))


def _short(value: float) -> str:
    return f"{value:.5g}"


def _interval(estimate: Estimate) -> str:
    return f"[{estimate.low:.4g}, {estimate.high:.4g}]"


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
