"""Whether a candidate may take the place of a baseline: what is tolerated, and what the same episodes tell of it."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from maze.core.errors import ConfigError, did_you_mean, unknown_key_error
from maze.report.comparison import LENGTH, RETURN, Comparison, PlayedEpisodes, aligned
from maze.report.estimates import Estimate
from maze.report.page import number_text

MORE, LESS, NONE = "more", "less", "none"
"""What is better of a measure."""
PASSED, WORSE, UNDECIDED, NOT_JUDGED = "passed", "worse", "undecided", "not judged"
MARGIN = 0.02
_FEW_EPISODES = 20
_MOST_EPISODES = 1_000_000
_ROUNDING = 1e-9
"""Of means, relative to them."""


@dataclass(frozen=True)
class Threshold:
    """What is tolerated of a measure.

    :param goal: What is better, `more` or `less`.
    :param margin: By which share of the baseline's mean the candidate may be worse; below 0, it has to be better.
    :param absolute_margin: By how much it may be worse, in units of the measure, instead of a share.
    :param limit: What the candidate's mean has to keep to, whatever the baseline does: a largest value where less is
        better, else a smallest one.
    """

    goal: str = MORE
    margin: float = MARGIN
    absolute_margin: float | None = None
    limit: float | None = None

    def tolerated(self, baseline: float) -> float:
        """By how much a candidate may be worse.

        :param baseline: Mean of the baseline.
        """
        return self.margin * abs(baseline) if self.absolute_margin is None else self.absolute_margin


def read_thresholds(
    config: Mapping[str, Any], minimize: Sequence[str] = (), maximize: Sequence[str] = (), margin: float = MARGIN
) -> dict[str, Threshold]:
    """Thresholds by measure; of the return, more is better unless something else is said.

    :param config: `goal`, `margin`, `absolute_margin` and `limit` by measure; `goal: none` leaves one out.
    :param minimize: Measures of which less is better.
    :param maximize: Measures of which more is better.
    :param margin: That of measures without a margin of their own.
    :raises ConfigError: A value is of another kind, or nobody says what is better of a measure.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"thresholds: expected a YAML file or a mapping such as {{waste: {{goal: less}}}}, got {config!r}."
        )
    default = _number("runner.margin", margin)
    if both := sorted({*minimize} & {*maximize}):
        raise ConfigError(f"runner.minimize and runner.maximize both name {', '.join(both)}.")
    goals = {RETURN: MORE, **dict.fromkeys(map(str, maximize), MORE), **dict.fromkeys(map(str, minimize), LESS)}
    thresholds = {measure: Threshold(goal, default) for measure, goal in goals.items()}
    for name, entry in config.items():
        measure, where = str(name), f"thresholds.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected a mapping such as {{goal: less, margin: 0.01}}, got {entry!r}.")
        numbers = {str(key): entry[key] for key in entry if key != "goal" and entry[key] is not None}
        for key in numbers.keys() - {"margin", "absolute_margin", "limit"}:
            raise unknown_key_error(f"{where}:", key, ("goal", "margin", "absolute_margin", "limit"))
        if {"margin", "absolute_margin"} <= numbers.keys():
            raise ConfigError(f"{where}: `margin` and `absolute_margin` exclude each other; leave one out.")
        goal = entry.get("goal") or goals.get(measure)
        if goal not in (MORE, LESS, NONE):
            raise ConfigError(
                f"{where}.goal: say what is better, `goal: {MORE}` or `goal: {LESS}`; `goal: {NONE}` does not judge it."
                f"{'' if goal is None else f' Found {goal!r}.'}"
            )
        if goal == NONE:
            thresholds.pop(measure, None)
        else:
            checked = {key: _number(f"{where}.{key}", value) for key, value in numbers.items()}
            thresholds[measure] = Threshold(goal, **{"margin": default, **checked})
    return thresholds


class Judged(NamedTuple):
    """One measure.

    :param measure: Its name.
    :param threshold: What is tolerated; `None`: it is not judged.
    :param baseline: Mean of the baseline.
    :param candidate: Mean of the candidate.
    :param difference: How much larger the candidate's mean is, in the same episodes.
    :param tolerated: By how much it may be worse.
    :param result: `passed`, `worse`, `undecided` or `not judged`.
    :param keeps_limit: The same of the limit; `passed` where there is none.
    :param n_needed: Number of episodes after which more would probably be known; 0: nobody can say.
    """

    measure: str
    threshold: Threshold | None
    baseline: Estimate
    candidate: Estimate
    difference: Estimate
    tolerated: float
    result: str
    keeps_limit: str
    n_needed: int = 0

    @property
    def passes(self) -> bool:
        """Whether it speaks for the candidate, or says nothing."""
        return self.result in (PASSED, NOT_JUDGED) and self.keeps_limit == PASSED

    @property
    def verdict(self) -> str:
        """In words."""
        if self.result in (PASSED, NOT_JUDGED) and self.keeps_limit != PASSED:
            return "beyond the limit" if self.keeps_limit == WORSE else "limit undecided"
        return self.result


@dataclass(frozen=True)
class Gate:
    """A candidate beside a baseline in the same episodes.

    A measure passes where the whole interval of its difference lies above what is tolerated (a test of
    non-inferiority, Piaggio et al. 2012): a candidate that is worse than tolerated passes with a probability of 2.5 %
    at most, however few episodes there are, and too few episodes make good candidates fail. All measures have to pass,
    so that their number makes the gate no more lenient.

    :param baseline: What the baseline reached.
    :param candidate: What the candidate reached, in the same episodes.
    :param thresholds: What is tolerated, by measure.
    :param seed: Of the bootstrap.
    :raises ConfigError: The episodes lack a measure that is to be judged.
    """

    baseline: PlayedEpisodes
    candidate: PlayedEpisodes
    thresholds: Mapping[str, Threshold] = field(default_factory=lambda: {RETURN: Threshold()})
    seed: int = 0

    def __post_init__(self) -> None:
        known = self.comparison.measures
        for name in self.thresholds:
            if name not in known:
                raise ConfigError(
                    f"The episodes have no {name}, which is to be judged.{did_you_mean(name, known)} There are "
                    f"{', '.join(known)}."
                )
        if not self.thresholds:
            raise ConfigError(f"There is nothing to judge. Say what is better of one of {', '.join(known)}.")

    @cached_property
    def comparison(self) -> Comparison:
        """Both side by side."""
        played = [self.baseline, self.candidate]
        minimized = [name for name, threshold in self.thresholds.items() if threshold.goal == LESS]
        without_goal = [name for name in self.baseline.measures if name not in self.thresholds]
        return Comparison(played, minimized, self.seed, without_goal)

    @cached_property
    def judged(self) -> list[Judged]:
        """All measures."""
        return [self._judged(measure) for measure in self.comparison.measures]

    @property
    def passes(self) -> bool:
        """Whether the candidate may take the baseline's place."""
        return all(each.passes for each in self.judged)

    @property
    def verdict(self) -> str:
        """In a sentence."""
        failed = [f"{each.measure} ({each.verdict})" for each in self.judged if not each.passes]
        if not failed:
            return "The candidate passes."
        return f"The candidate does not pass: {', '.join(failed)}."

    def _judged(self, measure: str) -> Judged:
        baseline, candidate = self.comparison.rows_of(measure)
        difference = candidate.difference
        assert difference is not None, "it is no baseline"
        threshold = self.thresholds.get(measure)
        facts = (measure, threshold, baseline.mean, candidate.mean, difference)
        if threshold is None:
            return Judged(*facts, 0.0, NOT_JUDGED, PASSED)
        tolerated = threshold.tolerated(baseline.mean.value)
        gain = _oriented(difference, threshold.goal)
        rounding = _ROUNDING * max(abs(baseline.mean.value), abs(candidate.mean.value))
        result, n_needed = _result(gain, -tolerated - rounding), 0
        if result == UNDECIDED and gain.value > -tolerated:
            # Intervals shrink with the square root of the number of episodes.
            wanted = self.comparison.n_episodes * ((gain.value - gain.low) / (gain.value + tolerated)) ** 2
            n_needed = _rounded_up(wanted) if wanted < _MOST_EPISODES else 0
        keeps_limit = PASSED
        if threshold.limit is not None:
            limit = threshold.limit if threshold.goal == MORE else -threshold.limit
            keeps_limit = _result(_oriented(candidate.mean, threshold.goal), limit)
        return Judged(*facts, tolerated, result, keeps_limit, n_needed)

    # -- words ------------------------------------------------------------------------------------------------------

    HEADER = ("measure", "better", "baseline", "candidate", "difference", "95 % interval", "tolerated", "verdict")
    """Headings of :meth:`rows`."""

    def rows(self) -> list[tuple[str, ...]]:
        """The table, a row for each measure."""
        return [
            (
                each.measure,
                each.threshold.goal if each.threshold else "",
                number_text(each.baseline.value),
                number_text(each.candidate.value),
                _difference(each),
                f"{number_text(each.difference.low)} to {number_text(each.difference.high)}",
                _tolerated(each),
                each.verdict,
            )
            for each in self.judged
        ]

    def remarks(self) -> Iterator[str]:
        """What has to be known besides, a sentence each."""
        n_episodes = self.comparison.n_episodes
        for each in self.judged:
            if each.n_needed:
                yield (
                    f"{each.measure} is undecided: {n_episodes} episodes are too few for its margin. About "
                    f"{each.n_needed:,} would decide it, if the difference stays what it is (runner.n_episodes)."
                )
            threshold = each.threshold
            is_share = threshold is not None and threshold.absolute_margin is None and threshold.margin != 0
            if is_share and each.baseline.low <= 0 <= each.baseline.high:
                yield (
                    f"The baseline's {each.measure} may as well be 0, and a share of that means little: give its "
                    "threshold an absolute_margin."
                )
        if missing := [each.measure for each in self.judged if each.threshold is None and each.measure != LENGTH]:
            yield (
                f"Not judged, since nobody has said what is better: {', '.join(missing)} (runner.minimize, "
                "runner.maximize or thresholds)."
            )
        if n_episodes < _FEW_EPISODES:
            yield f"Intervals of {n_episodes} episodes are narrower than they should be; take {_FEW_EPISODES} or more."

    def text(self) -> str:
        """The table for the console."""
        rows = [self.HEADER, *self.rows()]
        return "\n".join((*aligned(rows), "", *self.remarks(), self.verdict))

    def markdown(self, facts: Sequence[str] = ()) -> str:
        """The report for a pull request.

        :param facts: Sentences on what was played.
        """
        lines = [f"# Gate: {'passed' if self.passes else 'not passed'}", "", _escaped(self.verdict), ""]
        lines += [f"* {_escaped(fact)}" for fact in facts]
        lines += ["", _line(self.HEADER), _line(["---", "---", *["---:"] * 5, "---"])]
        lines += [_line([_escaped(cell) for cell in row]) for row in self.rows()]
        lines += ["", HOW_IT_IS_JUDGED, ""]
        lines += [f"* {_escaped(remark)}" for remark in self.remarks()]
        return "\n".join(lines).rstrip() + "\n"


HOW_IT_IS_JUDGED = (
    "A measure passes where the whole interval of the difference is better than what is tolerated; it is worse where "
    "the whole interval is worse than that, and undecided in between. All measures have to pass."
)


def _oriented(estimate: Estimate, goal: str) -> Estimate:
    """The estimate, turned so that more is better."""
    return estimate if goal == MORE else Estimate(-estimate.value, -estimate.high, -estimate.low)


def _result(estimate: Estimate, bound: float) -> str:
    """NaN is undecided."""
    if estimate.low >= bound:
        return PASSED
    return WORSE if estimate.high < bound else UNDECIDED


def _rounded_up(n_episodes: float) -> int:
    """Two digits: the number is a guess."""
    digits: int = 10 ** max(0, math.floor(math.log10(n_episodes)) - 1)
    return math.ceil(n_episodes / digits) * digits


def _difference(each: Judged) -> str:
    share = f" ({each.difference.value / abs(each.baseline.value):+.1%})" if each.baseline.value else ""
    sign = "+" if each.difference.value > 0 else ""
    return f"{sign}{number_text(each.difference.value)}{share}"


def _tolerated(each: Judged) -> str:
    threshold = each.threshold
    if threshold is None:
        return ""
    bound = -each.tolerated if threshold.goal == MORE else each.tolerated
    limit = "" if threshold.limit is None else f", limit {number_text(threshold.limit)}"
    return f"{'+' if bound > 0 else ''}{number_text(bound)}{limit}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    """Text as Markdown that shows nothing else, in a cell as well."""
    plain = " ".join(html.escape(text, quote=False).split())
    return "".join(f"\\{letter}" if letter in "\\`*_[]|" else letter for letter in plain)


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"{where}: expected a number, such as 0.02 for two per cent, got {value!r}.")
    return float(value)
