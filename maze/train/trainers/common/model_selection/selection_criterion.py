"""Criterion of the best model: a statistic or KPI, subject to constraints on others."""

from __future__ import annotations

import logging
import math
import operator
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsKey
from maze.core.log_stats.stats_format import name_parts, scalar_value

if TYPE_CHECKING:
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase


logger = logging.getLogger(__name__)

MEAN_REWARD = "BaseEnvEvents/reward/mean"

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "==": operator.eq,
}
_CONSTRAINT = re.compile(r"^\s*(?P<name>[^<>=]+?)\s*(?P<sign><=|>=|==|<|>)\s*(?P<bound>\S+)\s*$")
_SMALLEST_VIOLATION = 1e-9
_N_SHOWN = 20


class Judgement(NamedTuple):
    """How good an evaluation is."""

    score: float
    """More is better; NaN: it cannot be the best."""
    violation: float
    """0: all constraints hold; the more, the farther from that."""


class Constraint(NamedTuple):
    """A limit on a statistic."""

    text: str
    name: str
    sign: str
    bound: float

    @classmethod
    def parse(cls, text: Any) -> Constraint:
        """Read `<statistic> <=, >=, <, > or == <number>`.

        :raises ConfigError: The text is no comparison.
        """
        match = _CONSTRAINT.match(text) if isinstance(text, str) else None
        try:
            bound = float(match["bound"]) if match else math.nan
        except ValueError:
            bound = math.nan
        if match is None or math.isnan(bound):
            raise ConfigError(
                f"constraints: cannot read {text!r}. Expected a statistic or KPI, a comparison and a number, for "
                "instance 'kpi/waste <= 0.1'."
            )
        return cls(" ".join(text.split()), match["name"], match["sign"], bound)

    def violation(self, value: float) -> float:
        """Return how far a value is from what is allowed, relative to the bound; 0: it is allowed."""
        if _COMPARISONS[self.sign](value, self.bound):
            return 0.0
        if math.isnan(value):
            return math.inf
        return max(abs(value - self.bound), _SMALLEST_VIOLATION) / max(1.0, abs(self.bound))


class SelectionCriterion:
    """Judges evaluations by their epoch statistics.

    A statistic is named as TensorBoard shows it, with or without the prefix and the interface
    (`eval_BaseEnvEvents/kpi/mean/waste`, `kpi/mean/waste`). The mean, or an event's only statistic, needs no name
    of its own (`kpi/waste`, `invalid_cut`).

    :param objective: The statistic that counts; `None`: the mean reward.
    :param maximize: Whether more of it is better.
    :param constraints: Conditions, such as `kpi/waste <= 0.1`. An event that does not occur in an evaluation
        counts as 0; a name that no evaluation has had so far is logged as a warning once.
    :raises ConfigError: A value is of another type, or a constraint cannot be read.
    """

    def __init__(self, objective: str | None = None, maximize: bool = True, constraints: Sequence[str] = ()) -> None:
        if not isinstance(maximize, bool):
            raise ConfigError(f"maximize: expected true or false, got {maximize!r}.")
        if isinstance(constraints, str) or not all(isinstance(text, str) for text in constraints):
            raise ConfigError(f"constraints: expected a list of texts such as 'kpi/waste <= 0.1', got {constraints!r}.")
        self.objective = MEAN_REWARD if objective is None else objective
        self.maximize = maximize
        self.constraints = [Constraint.parse(text) for text in constraints]
        self._absent: set[str] = set()
        """Names in constraints that count as 0, since no evaluation has had them."""

    def judge(self, stats: LogStats) -> Judgement:
        """Return the score of an evaluation, and how far it is from fulfilling the constraints.

        :raises ConfigError: The evaluation has no such statistic.
        """
        value = find_statistic(stats, self.objective)
        if value is None:
            raise ConfigError(
                f"objective: the evaluation has no statistic or KPI {self.objective!r}."
                f"{_suggestion(stats, self.objective)} An event that does not occur in every evaluation makes no "
                "objective; a KPI that counts it does."
            )
        violation = sum(
            constraint.violation(self._constrained_value(stats, constraint)) for constraint in self.constraints
        )
        return Judgement(value if self.maximize else -value, violation)

    def _constrained_value(self, stats: LogStats, constraint: Constraint) -> float:
        value = find_statistic(stats, constraint.name)
        if value is not None:
            return value
        if constraint.name not in self._absent:
            problem = f"constraints: {constraint.text!r}: the evaluation has no statistic or KPI {constraint.name!r}"
            if "kpi" in _tokens(constraint.name)[:2]:  # KPIs are calculated in every evaluation
                raise ConfigError(f"{problem}.{_suggestion(stats, constraint.name)}")
            self._absent.add(constraint.name)
            logger.warning(
                "%s; it counts as 0, like an event that does not occur.%s", problem, _suggestion(stats, constraint.name)
            )
        return 0.0


def tell(selection: ModelSelectionBase, criterion: SelectionCriterion, stats: LogStats) -> None:
    """Notify a model selection of an evaluation.

    :param selection: The model selection.
    :param criterion: The criterion.
    :param stats: The evaluation's epoch statistics.
    """
    score, violation = criterion.judge(stats)
    selection.maximize = criterion.maximize
    if criterion.constraints:
        selection.update_constrained(score, violation)
    else:
        selection.update(score)


def find_statistic(stats: LogStats, name: str) -> float | None:
    """Return the value of the statistic with this name; `None`: there is none.

    :param stats: Statistics of one level.
    :param name: See :class:`SelectionCriterion`.
    :raises ConfigError: Several have this name.
    """
    wanted = _tokens(name)
    exact, loose = {}, {}
    for key, value in stats.items():
        if (number := scalar_value(value)) is not None:
            short = _spellings(key, with_output=False)
            if wanted in _spellings(key) or (key.output_name == "mean" and wanted in short):
                exact[key] = number
            elif wanted in short:
                loose[key] = number
    found = exact or loose
    if len(found) > 1:
        raise ConfigError(f"{name!r} may mean any of {', '.join(map(_full_name, found))}; name one of them.")
    return next(iter(found.values()), None)


def _spellings(key: LogStatsKey, with_output: bool = True) -> list[tuple[str, ...]]:
    """Return the parts of a statistic's name, without and with its interface."""
    interface, method, _ = name_parts(key)
    output = [key.output_name] if with_output and key.output_name is not None else []
    body = [method, *output, *(str(part) for part in key.group or ())]
    return [_tokens("/".join(parts)) for parts in (body, [interface, *body])]


def _full_name(key: LogStatsKey) -> str:
    return "/".join(_spellings(key)[1])


def _tokens(name: str) -> tuple[str, ...]:
    tokens = tuple(re.split(r"[\s/.]+", name.strip()))
    first = tokens[0].removeprefix("eval_")
    return tokens[1:] if first == "eval" else (first, *tokens[1:])


def _suggestion(stats: LogStats, name: str) -> str:
    keys = [key for key, value in stats.items() if scalar_value(value) is not None]
    spelled = {
        "/".join(spelling): _full_name(key)
        for with_output in (False, True)
        for key in reversed(keys)  # of several statistics of an event the first one
        for spelling in _spellings(key, with_output)
    }
    close = get_close_matches("/".join(_tokens(name)), spelled, n=1, cutoff=0.8)
    meant = f" Did you mean `{spelled[close[0]]}`?" if close else ""
    names = sorted(map(_full_name, keys))
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return f"{meant} Known: {', '.join(names[:_N_SHOWN]) or 'none'}{more}."
