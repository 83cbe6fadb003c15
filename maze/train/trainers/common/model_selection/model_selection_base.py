"""Interface of model selections; criterion of the best model: a statistic or KPI, subject to constraints on others."""

from __future__ import annotations

import inspect
import logging
import math
import re
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import event_definition
from maze.core.log_stats.log_stats import LogStats, LogStatsKey, event_named
from maze.core.log_stats.stats_format import name_parts, scalar_value
from maze.core.utils.config_utils import flag


class ModelSelectionBase(ABC):
    """Receive the evaluation results of the model being trained."""

    maximize: bool = True
    """False: scores are the negated values of a statistic of which less is better."""
    keeps_latest: bool = False
    """Whether the latest model that was evaluated is kept, although another one scored better."""
    last_improvement: int = 0
    """Number of evaluations since the best one."""

    @abstractmethod
    def update(self, reward: float) -> None:
        """Receive the score of the current model.

        :param reward: Mean reward of the evaluation; more is better.
        """

    def update_constrained(self, reward: float, violation: float) -> None:
        """Receive the score of the current model and its violation of constraints.

        :param reward: Score of the evaluation; more is better.
        :param violation: Violation of the constraints; 0: all are fulfilled.
        """
        self.update(reward if violation == 0 else -math.inf)

    def training_started(self) -> None:
        """Notify of the start of a run that reports its epochs."""

    def epoch_completed(self, epoch: int) -> None:
        """Notify of the end of an epoch, before its evaluation.

        :param epoch: Number of completed epochs.
        """

    def training_ended(self) -> None:
        """Notify of the end of a run, after its last evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next comparisons depend on; tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""


logger = logging.getLogger(__name__)

MEAN_REWARD = "BaseEnvEvents/reward/mean"

_CONSTRAINT = re.compile(r"^\s*(?P<name>[^<>=]+?)\s*(?P<sign><=|>=|==|<|>)\s*(?P<bound>\S+)\s*$")
_SMALLEST_VIOLATION = 1e-9


class Judgement(NamedTuple):
    """Score of an evaluation and its violation of the constraints."""

    score: float
    """More is better; NaN: it cannot be the best."""
    violation: float
    """Sum of the relative violations, at least 0; 0: all constraints hold."""


class Constraint(NamedTuple):
    """A limit on a statistic, or on the ratio of two.

    :param text: The comparison, with single spaces.
    :param name: Name of the statistic, see :class:`SelectionCriterion`.
    :param sign: `<=`, `>=`, `==`, `<` or `>`.
    :param bound: The number that the statistic is compared with.
    """

    text: str
    name: str
    sign: str
    bound: float
    per: str | None = None
    """Statistic that the first one is divided by; `None`: none."""

    @classmethod
    def parse(cls, text: Any) -> Constraint:
        """Read `<statistic> <=, >=, <, > or == <number>`; instead of a statistic `<statistic> per <statistic>`.

        :param text: The text, such as `kpi/waste <= 0.1`. Whether the statistic exists is not checked.
        :raises ConfigError: The text is not a comparison.
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
        name, _, per = re.sub(r"\s+per\s+", "\n", match["name"]).partition("\n")
        return cls(" ".join(text.split()), name, match["sign"], bound, per or None)

    def violation(self, value: float) -> float:
        """Return the violation of the constraint by a value, relative to the bound.

        :param value: Value of the statistic, or of the ratio.
        :return: 0: it is fulfilled. Otherwise the distance from the bound, at least 1e-9, divided by the bound's
            absolute value where that is above 1. Infinite for NaN.
        """
        if math.isnan(value):
            return math.inf
        found = "=" if value == self.bound else "<" if value < self.bound else ">"
        if found in self.sign:  # `<=` allows both
            return 0.0
        return max(abs(value - self.bound), _SMALLEST_VIOLATION) / max(1.0, abs(self.bound))


class SelectionCriterion:
    """Score evaluations by their epoch statistics.

    A statistic is named as TensorBoard shows it, with or without the prefix and the interface
    (`eval_BaseEnvEvents/kpi/mean/waste`, `kpi/mean/waste`). The mean, or an event's only statistic, needs no name
    of its own (`kpi/waste`, `invalid_cut`), and the mean of a KPI not even the prefix `kpi` (`waste`).

    :param objective: The statistic that counts; `None`: the mean reward.
    :param maximize: Whether more of it is better.
    :param constraints: Conditions, such as `kpi/waste <= 0.1` or `order_lost per order_assigned <= 0.05`. An event
        that does not occur in an evaluation counts as 0; a name that no evaluation has had is logged as a warning once.
    :raises ConfigError: A value is of another type, or a constraint cannot be read.
    """

    def __init__(self, objective: str | None = None, maximize: bool = True, constraints: Sequence[str] = ()) -> None:
        if isinstance(constraints, str) or not all(isinstance(text, str) for text in constraints):
            raise ConfigError(f"constraints: expected a list such as ['kpi/waste <= 0.1'], found {constraints!r}.")
        self.objective = MEAN_REWARD if objective is None else objective
        self.maximize = flag("maximize", maximize)
        self.constraints = [Constraint.parse(text) for text in constraints]
        # Names in constraints that were searched for in an evaluation.
        self._searched: set[str] = set()

    def judge(self, stats: LogStats) -> Judgement:
        """Return the score of an evaluation, and its violation of the constraints.

        :param stats: Epoch statistics of the evaluation.

        :raises ConfigError: The evaluation has no such statistic.
        """
        value = find_statistic(stats, self.objective)
        if value is None:
            raise ConfigError(
                f"objective: the evaluation has no statistic or KPI {self.objective!r}."
                f" {_known(stats)} An event that does not occur in every evaluation makes no objective; a KPI that "
                "counts it does."
            )
        violation = 0.0
        for constraint in self.constraints:
            found = self._value(stats, constraint, constraint.name)
            if constraint.per is not None and found:
                divisor = self._value(stats, constraint, constraint.per)
                found = found / divisor if divisor else math.copysign(math.inf, found)
            violation += constraint.violation(found)
        return Judgement(value if self.maximize else -value, violation)

    def _value(self, stats: LogStats, constraint: Constraint, name: str) -> float:
        value = find_statistic(stats, name)
        if value is None and name not in self._searched:
            problem = f"constraints: {constraint.text!r}: the evaluation has no statistic or KPI {name!r}"
            if next(_events(_tokens(name)), None) is None:  # a KPI, or misspelt
                raise ConfigError(f"{problem}. {_known(stats)} A KPI has to occur in the first evaluation.")
            logger.warning("%s; it counts as 0, like an event that does not occur. %s", problem, _known(stats))
        self._searched.add(name)
        return value or 0.0


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
            if key.event is BaseEnvEvents.kpi:
                short.append(_tokens("/".join(map(str, key.group or ()))))
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


def _known(stats: LogStats) -> str:
    names = sorted(_full_name(key) for key, value in stats.items() if scalar_value(value) is not None)
    return f"Known: {', '.join(names) or 'none'}."


# -- sources of constrained statistics in rollouts ---------------------------------------------------------------------


_MEANS, _SUMS = (np.mean, statistics.mean), (sum, np.sum)


class StatisticSource(NamedTuple):
    """Values of single steps or episodes that a statistic is the mean of."""

    event: tuple[str, str]
    """Module and qualified name of the event's interface method."""
    output_name: str | None
    group: tuple[str, ...]
    at_end: bool
    """Whether the value is known at the end of an episode only; otherwise it is the sum of values of its steps."""
    is_rate: bool = False
    """Whether it is the average over steps, not a sum over those of an episode."""
    of_some: bool = False
    """Whether it is the mean of the episodes that have it, not of all."""
    is_occurrence: bool = False
    """Whether the value is 1 where the statistic occurs, otherwise 0: the weight of an episode in such a mean."""

    def __str__(self) -> str:
        return "/".join((*self.event[1].split("."), *self.group))

    def of(self, stats: Mapping[LogStatsKey, Any]) -> Any:
        """Return its value in statistics; 0 without the event.

        :param stats: Statistics of an episode if `at_end`, otherwise of a step.
        """
        value = self._found(stats)
        return float(value is not None) if self.is_occurrence else 0.0 if value is None else value

    def _found(self, stats: Mapping[LogStatsKey, Any]) -> Any:
        event = event_named(*self.event)
        if event is not None and not self.group:
            return stats.get(LogStatsKey(event, self.output_name, None))
        for key, value in stats.items():
            of_event = (key.event.__module__, key.event.__qualname__)
            if (of_event, key.output_name, tuple(map(str, key.group or ()))) == self[:3]:
                return value
        return None


def statistic_source(name: str) -> StatisticSource:
    """Return the source of a statistic in rollouts: of an event of an imported interface, otherwise of a KPI.

    :param name: See :class:`SelectionCriterion`.
    :raises ConfigError: The statistic is not a mean over episodes, or several events have this name.
    """
    wanted = _tokens(name)
    found = {source for method, names in _events(wanted) for source in _sources_of(method, names)}
    if len(found) > 1:
        raise ConfigError(
            f"constraints: {name!r} may mean any of {', '.join(sorted('/'.join(s.event) for s in found))}; begin with "
            "the name of the interface."
        )
    group = tuple(part for part in wanted if part not in ("BaseEnvEvents", "kpi", "mean"))
    event = (BaseEnvEvents.kpi.__module__, BaseEnvEvents.kpi.__qualname__)
    return next(iter(found), StatisticSource(event, None, group, at_end=True, of_some=True))


def _events(wanted: tuple[str, ...]) -> Iterator[tuple[Callable[..., Any], tuple[str, ...]]]:
    """Yield the methods of imported interfaces that a name may begin with, and the name without the interface."""
    interfaces: set[type[Any]] = {object}
    waiting: list[type[Any]] = [object]
    while waiting:
        known = {each for each in type.__subclasses__(waiting.pop()) if each not in interfaces}
        interfaces |= known
        waiting += known
    for interface in interfaces:
        names = wanted[1:] if wanted[0] == interface.__name__ and len(wanted) > 1 else wanted
        method = vars(interface).get(names[0])
        if inspect.isfunction(method) and method is not BaseEnvEvents.kpi and event_definition(method).epoch:
            yield method, names


def _sources_of(method: Callable[..., Any], names: tuple[str, ...]) -> Iterator[StatisticSource]:
    definition, event = event_definition(method), (method.__module__, method.__qualname__)
    for epoch in definition.epoch:
        names_output = names[1:2] == (epoch.output_name,)
        group = names[1 + names_output :]
        if not names_output and len(definition.epoch) > 1 and epoch.output_name not in (None, "mean"):
            continue
        if len(group) != len(definition.grouping) or epoch.group_by is not None:
            continue
        if epoch.reduce_function not in _MEANS:
            raise ConfigError(
                f"constraints: {'/'.join(names)!r} is not a mean over episodes, which constraints of a training run "
                "need; expected a statistic `define_epoch_stats(np.mean, ...)`, or a KPI."
            )
        episode = next((stat for stat in definition.episode if stat.output_name == epoch.input_name), None)
        if episode is None:
            continue
        step = next((stat for stat in definition.step if stat.output_name == episode.input_name), None)
        counts = step is not None and step.reduce_function in (*_SUMS, len)  # steps without the event are zeros
        adds_up = counts and episode.reduce_function in (*_SUMS, *_MEANS)
        output = episode.input_name if adds_up else episode.output_name
        is_rate = adds_up and episode.reduce_function in _MEANS
        yield StatisticSource(event, output, group, not adds_up, is_rate, of_some=not counts)
