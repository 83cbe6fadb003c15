"""Release gate: a test of non-inferiority of a candidate policy against a baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig

from maze.core.annotations import override
from maze.core.errors import ConfigError, GateNotPassedError, did_you_mean, unknown_key_error
from maze.core.utils.config_utils import number
from maze.core.utils.files import aligned
from maze.core.utils.stats_utils import Estimate, episodes_to_see, mean_interval, unseen_share
from maze.evaluation.comparison import LENGTH, RETURN, Comparison, PlayedEpisodes
from maze.evaluation.runners import ComparisonRunner, goals_of
from maze.report.page import Page, fact_list, number_text, page_section, table
from maze.runner import Runner

MORE, LESS, NONE = "more", "less", "none"
"""Goals of a measure."""
PASSED, WORSE, UNDECIDED, NOT_JUDGED = "passed", "worse", "undecided", "not judged"
_CVAR = "_cvar"
MARGIN = 0.02
MIN_EPISODES = 200
"""Smallest number of episodes for measures without a known range, see `benchmarks/intervals.py`."""
# Tolerance for rounding errors of means, relative to them.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Threshold:
    """Non-inferiority margin and limit of a measure.

    :param goal: `more` or `less`, which is better.
    :param margin: Share of the baseline's mean by which the candidate may be worse; negative: it has to be better.
    :param absolute_margin: Margin in units of the measure, instead of a share.
    :param limit: Bound for the candidate's mean, independent of the baseline: the largest value if less is better,
        otherwise the smallest.
    :param range: The smallest and the largest possible value of an episode, if known.
    """

    goal: str = MORE
    margin: float = MARGIN
    absolute_margin: float | None = None
    limit: float | None = None
    range: tuple[float, float] | None = None

    def tolerated(self, baseline: float) -> float:
        """Return the margin in units of the measure.

        :param baseline: Mean of the baseline.
        """
        return self.margin * abs(baseline) if self.absolute_margin is None else self.absolute_margin


def read_thresholds(
    config: Mapping[str, Any], minimize: Sequence[str] = (), maximize: Sequence[str] = (), margin: float = MARGIN
) -> dict[str, Threshold]:
    """Read thresholds by measure; the goal of the return is `more` by default.

    :param config: `goal`, `margin`, `absolute_margin`, `limit` and `range` by measure; `goal: none` excludes a measure.
    :param minimize: Measures for which less is better.
    :param maximize: Measures for which more is better.
    :param margin: Default margin.
    :raises ConfigError: A value has a wrong type, or a measure has no goal.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"thresholds: expected a YAML file or a mapping such as {{waste: {{goal: less}}}}, found {config!r}."
        )
    default = number("runner.margin", margin)
    minimize, maximize = goals_of(minimize, maximize)
    goals = {RETURN: MORE, **dict.fromkeys(maximize, MORE), **dict.fromkeys(minimize, LESS)}
    thresholds = {measure: Threshold(goal, default) for measure, goal in goals.items()}
    for name, entry in config.items():
        measure, where = str(name), f"thresholds.{name}"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{where}: expected a mapping such as {{goal: less, margin: 0.01}}, found {entry!r}.")
        given = {str(key): entry[key] for key in entry if key != "goal" and entry[key] is not None}
        numbers = {key: value for key, value in given.items() if key != "range"}
        for key in numbers.keys() - {"margin", "absolute_margin", "limit"}:
            raise unknown_key_error(f"{where}:", key, ("goal", "margin", "absolute_margin", "limit", "range"))
        if {"margin", "absolute_margin"} <= numbers.keys():
            raise ConfigError(f"{where}: `margin` and `absolute_margin` exclude each other; leave one out.")
        goal = entry.get("goal") or goals.get(measure) or goals.get(measure.removesuffix(_CVAR))
        if goal not in (MORE, LESS, NONE):
            raise ConfigError(
                f"{where}.goal: expected {MORE} or {LESS}, which is better, or {NONE}, which excludes the measure."
                f"{'' if goal is None else f' Found {goal!r}.'}"
            )
        if goal == NONE:
            thresholds.pop(measure, None)
        else:
            checked = {key: number(f"{where}.{key}", value) for key, value in numbers.items()}
            bounds = _bounds(f"{where}.range", given["range"]) if "range" in given else None
            thresholds[measure] = Threshold(goal, **{"margin": default, **checked}, range=bounds)
    return thresholds


def tail_thresholds(thresholds: Mapping[str, Threshold], config: Mapping[str, Any]) -> dict[str, Threshold]:
    """Add a threshold of the CVaR, `<measure>_cvar`, with the goal and the margin of its measure, to each threshold.

    :param thresholds: Thresholds by measure.
    :param config: Configured thresholds; those of a CVaR stay as configured.
    """
    tails = {
        tail_name(name): replace(each, limit=None, range=None)
        for name, each in thresholds.items()
        if not name.endswith(_CVAR) and tail_name(name) not in config
    }
    return {**thresholds, **tails}


def tail_name(measure: str) -> str:
    """Return the name of the CVaR of a measure."""
    return f"{measure}{_CVAR}"


def with_tails(played: PlayedEpisodes, level: float, thresholds: Mapping[str, Threshold]) -> PlayedEpisodes:
    """Add the contributions of the episodes to the CVaR of each measure whose CVaR has a threshold.

    :param played: The episodes.
    :param level: Share of the episodes that are the worst.
    :param thresholds: Thresholds by measure. If less of a CVaR is better, the largest values are the worst.
    """
    judged = {name: thresholds[tail_name(name)] for name in played.measures if tail_name(name) in thresholds}
    tails = played.tails(level, [name for name, threshold in judged.items() if threshold.goal == LESS]).measures
    return replace(played, measures={**played.measures, **{tail_name(name): tails[name] for name in judged}})


def require_measures(thresholds: Mapping[str, Threshold], known: Sequence[str]) -> None:
    """Require at least one threshold, and the measures of all of them.

    :param thresholds: Thresholds by measure.
    :param known: Measures of the episodes.
    :raises ConfigError: A measure is missing, or no measure has a threshold.
    """
    for name in thresholds:
        if name not in known:
            raise ConfigError(
                f"The episodes have no measure {name}.{did_you_mean(name, known)} There are {', '.join(known)}."
            )
    if not thresholds:
        raise ConfigError(f"thresholds: no measure has a goal. State the goal of one of {', '.join(known)}.")


def require_episodes(n_episodes: int, thresholds: Mapping[str, Threshold], min_episodes: int = MIN_EPISODES) -> None:
    """Require enough episodes for measures without a known range.

    :param n_episodes: Number of episodes.
    :param thresholds: Thresholds by measure; those with a `range` need no number of episodes.
    :param min_episodes: Required number, as fewer episodes miss rare losses.
    :raises ConfigError: There are fewer than `min_episodes`, and a measure has no range.
    """
    unbounded = [name for name, threshold in thresholds.items() if threshold.range is None]
    if n_episodes < min_episodes and unbounded:
        example = f"thresholds={{{unbounded[0]}: {{range: [<smallest>, <largest>]}}}}"
        raise ConfigError(
            f"runner.n_episodes: expected at least {min_episodes} to judge {', '.join(unbounded)}, found {n_episodes}. "
            f"Fewer episodes miss rare losses. Play more episodes (of other instances, with `env.instances`), or "
            f"state the range of an episode's value "
            f"('{example}'), with which intervals are valid for any number of episodes."
        )


class Judged(NamedTuple):
    """Result for one measure.

    :param measure: Name of the measure.
    :param threshold: The threshold; `None`: the measure is not judged.
    :param baseline: Mean of the baseline.
    :param candidate: Mean of the candidate.
    :param difference: Difference of the candidate's mean from the baseline's, in the same episodes.
    :param tolerated: The margin in units of the measure.
    :param reserve: Difference in the direction of the goal plus the margin, which is uncertain if it is relative.
    :param result: `passed`, `worse`, `undecided` or `not judged`.
    :param keeps_limit: Result for the limit; `passed` if there is none.
    """

    measure: str
    threshold: Threshold | None
    baseline: Estimate
    candidate: Estimate
    difference: Estimate
    tolerated: float
    reserve: Estimate | None
    result: str
    keeps_limit: str

    @property
    def passes(self) -> bool:
        """Whether the measure passes or is not judged."""
        return self.verdict in (PASSED, NOT_JUDGED)

    @property
    def verdict(self) -> str:
        """The result for reports."""
        if self.result == PASSED and self.keeps_limit != PASSED:
            return "beyond the limit" if self.keeps_limit == WORSE else "limit undecided"
        return self.result


@dataclass(frozen=True)
class Gate:
    """Non-inferiority test of a candidate against a baseline in the same episodes.

    A measure passes if the whole 95 % interval of its reserve (difference plus margin) is not negative (Piaggio et al.
    2012). In simulations with at least 200 episodes (`benchmarks/intervals.py`), a candidate exactly at the margin
    passes in at most 3.5 % of cases. All measures have to pass, so further measures never make the gate more lenient.
    Assumptions: :mod:`maze.core.utils.stats_utils`.

    :param baseline: Measures of the baseline.
    :param candidate: Measures of the candidate, in the same episodes.
    :param thresholds: Thresholds by measure.
    :param min_episodes: Smallest number of episodes for measures without a known range.
    :raises ConfigError: The episodes lack a measure with a threshold, are too few, or leave the stated range.
    """

    baseline: PlayedEpisodes
    candidate: PlayedEpisodes
    thresholds: Mapping[str, Threshold] = field(default_factory=lambda: {RETURN: Threshold()})
    min_episodes: int = MIN_EPISODES

    def __post_init__(self) -> None:
        require_measures(self.thresholds, self.comparison.measures)
        require_episodes(self.comparison.n_episodes, self.thresholds, self.min_episodes)
        for name, threshold in self.thresholds.items():
            values = np.concatenate([each.measures[name].ravel() for each in (self.baseline, self.candidate)])
            if threshold.range is not None and values.clip(*threshold.range).tolist() != values.tolist():
                raise ConfigError(
                    f"thresholds.{name}.range: the episodes have values from {values.min():g} to {values.max():g}, "
                    f"expected values within {list(threshold.range)}. State a range that holds all possible values."
                )

    @cached_property
    def comparison(self) -> Comparison:
        """The comparison of both policies."""
        played = [self.baseline, self.candidate]
        goals = {name: threshold.goal for name, threshold in self.thresholds.items()}
        minimized, maximized = ([name for name in goals if goals[name] == goal] for goal in (LESS, MORE))
        return Comparison(played, minimized, maximized)

    @cached_property
    def judged(self) -> list[Judged]:
        """Results of all measures."""
        return [self._judged(measure) for measure in self.comparison.measures]

    @property
    def passes(self) -> bool:
        """Whether the candidate passes."""
        return all(each.passes for each in self.judged)

    @property
    def verdict(self) -> str:
        """The verdict as a sentence."""
        failed = [f"{each.measure} ({each.verdict})" for each in self.judged if not each.passes]
        if not failed:
            return "The candidate passes."
        return f"The candidate does not pass: {', '.join(failed)}."

    def _judged(self, measure: str) -> Judged:
        baseline, candidate = self.comparison.rows_of(measure)
        difference = candidate.difference
        assert difference is not None, "the candidate is not the reference"
        threshold = self.thresholds.get(measure)
        facts = (measure, threshold, baseline.mean, candidate.mean, difference)
        if threshold is None:
            return Judged(*facts, 0.0, None, NOT_JUDGED, PASSED)
        reserve = self._reserve(measure, threshold)
        rounding = _ROUNDING * max(abs(baseline.mean.value), abs(candidate.mean.value))
        result = _result(reserve, -rounding)
        keeps_limit = PASSED
        if threshold.limit is not None:
            sign = 1.0 if threshold.goal == MORE else -1.0
            bounds = None if threshold.range is None else _range_of([sign * end for end in threshold.range])
            found = mean_interval(sign * self.candidate.measures[measure], bounds=bounds)
            keeps_limit = _result(Estimate.of(found), sign * threshold.limit - rounding)
        return Judged(*facts, threshold.tolerated(baseline.mean.value), reserve, result, keeps_limit)

    def _reserve(self, measure: str, threshold: Threshold) -> Estimate:
        """Estimate the reserve."""
        ours, theirs = self.candidate.measures[measure], self.baseline.measures[measure]
        sign, ends = 1.0 if threshold.goal == MORE else -1.0, threshold.range or ()

        def oriented(their_factor: float) -> Estimate:
            """Estimate the difference from a multiple of the baseline, in the direction of the goal."""
            differences = [sign * our - their_factor * their for our in ends for their in ends]
            bounds = _range_of(differences) if differences else None
            return Estimate.of(mean_interval(sign * ours, their_factor * theirs, bounds))

        share = 0.0 if threshold.absolute_margin is not None else threshold.margin * math.copysign(1.0, theirs.mean())
        found = oriented(sign - share)
        if share and threshold.margin > 0:
            # A relative margin is never negative, even if the mean is uncertain.
            found = found.at_least(oriented(sign).low)
        return Estimate(*(end + (threshold.absolute_margin or 0.0) for end in found))

    # -- reports ----------------------------------------------------------------------------------------------------

    HEADER = ("measure", "better", "baseline", "candidate", "difference", "tolerated", "reserve, 95 %", "verdict")
    """Headings of :meth:`rows`."""

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table, one row for each measure."""
        return [
            (
                each.measure,
                each.threshold.goal if each.threshold else "",
                number_text(each.baseline.value),
                number_text(each.candidate.value),
                f"{each.difference.value:+.5g}",
                _tolerated(each),
                f"{number_text(each.reserve.low)} to {number_text(each.reserve.high)}" if each.reserve else "",
                each.verdict,
            )
            for each in self.judged
        ]

    def remarks(self) -> Iterator[str]:
        """Yield remarks on the result, one sentence each."""
        n_episodes = self.comparison.n_episodes
        for each in self.judged:
            threshold = each.threshold
            is_share = threshold is not None and threshold.absolute_margin is None and threshold.margin != 0
            if is_share and each.baseline.low <= 0 <= each.baseline.high:
                yield (
                    f"The baseline's {each.measure} does not differ significantly from 0, so a relative margin is "
                    f"meaningless: set thresholds.{each.measure}.absolute_margin."
                )
        if missing := [each.measure for each in self.judged if each.threshold is None and each.measure != LENGTH]:
            yield (
                f"Not judged, because no goal is stated: {', '.join(missing)} (runner.minimize, runner.maximize or "
                "thresholds)."
            )
        if any(threshold.range is None for threshold in self.thresholds.values()):
            yield (
                f"Losses in fewer than {unseen_share(n_episodes):.2g} of the episodes may be missing in these "
                f"{n_episodes:,}; one in a thousand needs {episodes_to_see(0.001):,} to occur (97.5 %)."
            )

    def text(self) -> str:
        """Return the table for the console."""
        return "\n".join((*aligned([self.HEADER, *self.rows()]), "", *self.remarks(), self.verdict))

    def markdown(self, facts: Sequence[str] = ()) -> str:
        """Return the report for a pull request.

        :param facts: Sentences on policies and episodes.
        """
        lines = "\n".join((*facts, "", self.text(), "", HOW_IT_IS_JUDGED)).splitlines()
        heading = f"# Gate: {'passed' if self.passes else 'not passed'}"
        return "\n".join([heading, "", *(f"    {line}" for line in lines), ""])  # indented: names stay text


HOW_IT_IS_JUDGED = (
    "The reserve is the difference, in the direction of the goal, plus the margin. A measure passes if its whole "
    "interval is not negative; it is worse if the whole interval is negative, and undecided otherwise. All measures "
    "have to pass."
)


def _range_of(ends: Sequence[float]) -> tuple[float, float]:
    return min(ends), max(ends)


def _result(estimate: Estimate, bound: float) -> str:
    """Compare an interval with a bound; NaN is undecided."""
    if estimate.low >= bound:
        return PASSED
    return WORSE if estimate.high < bound else UNDECIDED


def _tolerated(each: Judged) -> str:
    if (threshold := each.threshold) is None:
        return ""
    bound = -each.tolerated if threshold.goal == MORE else each.tolerated
    limit = "" if threshold.limit is None else f", limit {number_text(threshold.limit)}"
    return f"{bound:+.5g}{limit}"


def _bounds(where: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ConfigError(f"{where}: expected the smallest and the largest value, such as [0, 500], found {value!r}.")
    low, high = (number(where, end) for end in value)
    if not low < high:
        raise ConfigError(f"{where}: expected the smallest value first, found {value!r}.")
    return low, high


# -- the command -------------------------------------------------------------------------------------------------------

MARKDOWN_FILE = "gate.md"


@dataclass
class GateRunner(ComparisonRunner):
    """Compare a candidate with a baseline and fail unless the candidate passes the gate.

    Writes the files of a comparison, with the verdict first, and `gate.md`.

    :param policies: The baseline and the candidate, in this order, as for a comparison.
    :param n_episodes: Number of episodes.
    :param margin: Share of the baseline's mean by which the candidate may be worse.
    :param thresholds: Thresholds of single measures, see :func:`read_thresholds`.
    :param risk: Share of the episodes that are the worst, such as 0.1: the CVaR of each judged measure is judged as
        well, as `<measure>_cvar`.
    """

    n_episodes: int = MIN_EPISODES
    margin: float = MARGIN
    thresholds: Mapping[str, Any] | None = None
    gate: Gate = field(init=False, repr=False, compare=False)
    """The result of :meth:`run`; available after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.policies) != 2:
            raise ConfigError(f"policies: a gate takes a baseline and a candidate, found {len(self.policies)}.")
        if len(self._levels) > 1:
            raise ConfigError(f"runner.risk: a gate judges one CVaR, such as 0.1; found {self.risk!r}.")
        self._thresholds = read_thresholds(self.thresholds or {}, self.minimize, self.maximize, self.margin)
        if self._levels:
            self._thresholds = tail_thresholds(self._thresholds, self.thresholds or {})
        require_episodes(self.n_episodes, self._thresholds)

    @override(Runner)
    def setup(self, cfg: DictConfig) -> None:
        super().setup(cfg)
        require_episodes(self.n_episodes // self._repeats, self._thresholds)
        names = {name: cfg.get(str(name)) for name in self.policies}
        self._facts = [f"{name}: {what}" for name, what in names.items() if what is not None]
        seeds = cfg.get("seeding") or {}
        self._facts.append(
            f"{self.n_episodes} episodes, the same for both (seeding.env_base_seed={seeds.get('env_base_seed')} "
            f"seeding.agent_base_seed={seeds.get('agent_base_seed')})"
        )

    @override(Runner)
    def run(self, **kwargs: Any) -> None:
        super().run(**kwargs)
        if not self.gate.passes:
            raise GateNotPassedError(self.gate.verdict)

    @override(ComparisonRunner)
    def _check_rewards(self) -> None:
        ours, theirs = self._rewards.values()
        if {RETURN, tail_name(RETURN)} & {*self._thresholds} and ours != theirs:
            raise ConfigError(
                f"The returns cannot be compared: the reward wrappers of the baseline are {ours or 'none'}, those of "
                f"the candidate {theirs or 'none'}. Set the wrappers of both (wrappers=<option>), or "
                f"judge KPIs only: 'thresholds={{{RETURN}: {{goal: none}}}}' and runner.minimize or runner.maximize."
            )

    @override(ComparisonRunner)
    def _compared(self, played: Sequence[PlayedEpisodes]) -> Comparison:
        baseline, candidate = played
        if self._levels:
            level, thresholds = self._levels[0], self._thresholds
            baseline, candidate = (with_tails(each, level, thresholds) for each in (baseline, candidate))
        self.gate = Gate(baseline, candidate, self._thresholds)
        return replace(self.gate.comparison, played=played)

    @override(ComparisonRunner)
    def _require_goals(self, known: Sequence[str]) -> None:
        require_measures(self._thresholds, [*known, *map(tail_name, known if self._levels else ())])

    @override(ComparisonRunner)
    def _text(self, comparison: Comparison) -> str:
        return self.gate.text()

    @override(ComparisonRunner)
    def _files(self, comparison: Comparison) -> dict[str, str]:
        return {MARKDOWN_FILE: self.gate.markdown(self._facts), **super()._files(comparison)}

    @override(ComparisonRunner)
    def _completed(self, page: Page) -> Page:
        gate = self.gate
        verdict = page_section(
            "Verdict",
            table(gate.HEADER, gate.rows(), gate.verdict),
            facts=f"<p>{HOW_IT_IS_JUDGED}</p>" + fact_list(("remark", each) for each in gate.remarks()),
        )
        state = "passed" if gate.passes else "failed"
        return replace(page, subtitle="; ".join(self._facts), sections=[verdict, *page.sections], state=state)
