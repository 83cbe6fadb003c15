"""Criterion of the best model: a statistic or KPI, subject to constraints on others."""

from __future__ import annotations

import inspect
import logging
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import EventDefinition, event_definition
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
        bound = _number(match["bound"]) if match else None
        if match is None or bound is None:
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
        counts as 0.
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
        self._may_be_absent: set[str] = set()
        """Names in constraints that are statistics of events which have not occurred yet."""

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
        if constraint.name in self._may_be_absent:
            return 0.0
        if is_declared(_tokens(constraint.name)):
            self._may_be_absent.add(constraint.name)
            return 0.0
        if _closest(stats, constraint.name) is not None:
            raise ConfigError(
                f"constraints: {constraint.text!r}: the evaluation has no statistic or KPI {constraint.name!r}."
                f"{_suggestion(stats, constraint.name)}"
            )
        self._may_be_absent.add(constraint.name)
        logger.warning(
            "Constraint %r: the evaluation has no such statistic or KPI, and no event of this name is known; taken for "
            "an event that did not occur, which counts as 0.%s",
            constraint.text,
            _suggestion(stats, constraint.name),
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
    numbers = [(key, number) for key, value in stats.items() if (number := scalar_value(value)) is not None]
    exact = [(key, number) for key, number in numbers if wanted in _spellings(key)]
    found = exact or [(key, number) for key, number in numbers if wanted in _spellings_without_output(key)]
    if len(found) > 1:
        raise ConfigError(
            f"{name!r} may mean any of {', '.join(_full_name(key) for key, _ in found)}; name one of them."
        )
    return found[0][1] if found else None


def _spellings(key: LogStatsKey) -> list[tuple[str, ...]]:
    interface, method, _ = name_parts(key)
    group = [str(part) for part in key.group or ()]
    bodies = [[method, *([key.output_name] if key.output_name is not None else []), *group]]
    if key.output_name == "mean":
        bodies.append([method, *group])
    return [_tokens("/".join(parts)) for body in bodies for parts in (body, [interface, *body])]


def _spellings_without_output(key: LogStatsKey) -> list[tuple[str, ...]]:
    interface, method, _ = name_parts(key)
    body = [method, *(str(part) for part in key.group or ())]
    return [_tokens("/".join(parts)) for parts in (body, [interface, *body])]


def _full_name(key: LogStatsKey) -> str:
    return "/".join(_spellings(key)[1])


def _tokens(name: str) -> tuple[str, ...]:
    tokens = tuple(re.split(r"[\s/.]+", name.strip()))
    first = tokens[0].removeprefix("eval_")
    return tokens[1:] if first == "eval" else (first, *tokens[1:])


def _names(stats: LogStats) -> list[str]:
    return sorted({_full_name(key) for key, value in stats.items() if scalar_value(value) is not None})


def _closest(stats: LogStats, name: str) -> str | None:
    wanted = "/".join(_tokens(name))
    spellings: dict[str, LogStatsKey] = {}
    for spell in (_spellings, _spellings_without_output):
        for key, value in stats.items():
            if scalar_value(value) is not None:
                for spelling in spell(key):
                    spellings.setdefault("/".join(spelling), key)
    close = get_close_matches(wanted, spellings, n=1, cutoff=0.8)
    return _full_name(spellings[close[0]]) if close else None


def _suggestion(stats: LogStats, name: str) -> str:
    names = _names(stats)
    close = _closest(stats, name)
    meant = f" Did you mean `{close}`?" if close else ""
    more = f" and {len(names) - _N_SHOWN} more" if len(names) > _N_SHOWN else ""
    return f"{meant} Known: {', '.join(names[:_N_SHOWN]) or 'none'}{more}."


def _number(text: str) -> float | None:
    try:
        value: Any = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else float(value)


def is_declared(name: Sequence[str]) -> bool:
    """Return whether an interface of this process declares an event with this epoch statistic.

    KPIs are no events: one that is missing is not calculated. It inspects every class; call it once.

    :param name: Parts of the statistic's name: interface (if it is named), method, statistic (if it is named), groups.
    """
    return any(
        method is not BaseEnvEvents.kpi and _has_statistic(event_definition(method), rest)
        for interface in _all_classes()
        for method, rest in _methods(interface, name)
    )


def _methods(interface: type[Any], name: Sequence[str]) -> Iterator[tuple[Callable[..., Any], Sequence[str]]]:
    """Possible meanings of the name in an interface: a method, and the parts after it."""
    members = vars(interface)
    for position in (0, 1) if len(name) > 1 and name[0] == interface.__name__ else (0,):
        method = members.get(name[position])
        if inspect.isfunction(method):
            yield method, name[position + 1 :]


def _has_statistic(definition: EventDefinition, rest: Sequence[str]) -> bool:
    for statistic in definition.epoch:
        n_groups = 1 if statistic.group_by is not None else len(definition.grouping)
        names_output = bool(rest) and rest[0] == statistic.output_name
        if n_groups == len(rest) - names_output or not len(rest) - names_output:
            return True
    return False


def _all_classes() -> Iterator[type[Any]]:
    waiting: list[type[Any]] = [object]
    seen: set[type[Any]] = set()
    while waiting:
        for subclass in type.__subclasses__(waiting.pop()):
            if subclass not in seen:
                seen.add(subclass)
                waiting.append(subclass)
                yield subclass
