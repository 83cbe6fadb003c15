"""Decorators that define the statistics of an event on each level.

An event method has any number of definitions per level. Levels form a hierarchy: the events of an environment step are
reduced to step statistics, those of all steps to episode statistics, those of all episodes to epoch statistics.
`input_name` selects the input of a definition: on the step level an attribute of the event, above it the `output_name`
of the level below.

Definitions of one level with the same name are named after their differences: their inputs, or else their functions.
Definitions of the level above for the common name apply to each of them.

Definitions are stored on the function; :mod:`maze.core.log_stats.reducer_functions` compiles them once per event. Rows
appear in the order in which the decorators are applied, that is from the method upwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

import numpy as np

EventMethod = TypeVar("EventMethod", bound=Callable[..., Any])

_ATTRIBUTE = "__maze_event_stats__"


@dataclass(frozen=True)
class StatsDefinition:
    """Statistic of an event on one level; the fields are the arguments of :func:`define_step_stats`."""

    reduce_function: Callable[[Any], Any] | None
    input_name: str | None
    output_name: str | None
    group_by: str | None
    cumulative: bool


@dataclass(frozen=True)
class PlotDefinition:
    """Figure of an epoch statistic of an event; the fields are the arguments of :func:`define_plot`."""

    create_figure_function: Callable[..., Any]
    input_name: str | None


@dataclass
class EventDefinition:
    """Definitions of an event by its decorators, in the order in which they were applied."""

    step: list[StatsDefinition] = field(default_factory=list)
    episode: list[StatsDefinition] = field(default_factory=list)
    epoch: list[StatsDefinition] = field(default_factory=list)
    grouping: tuple[str, ...] = ()
    plots: list[PlotDefinition] = field(default_factory=list)


@cache
def event_definition(event: Callable[..., Any]) -> EventDefinition:
    """Return the statistics defined for an event method, each with a unique name.

    An event without definitions has an empty one.
    """
    definition = getattr(event, _ATTRIBUTE, None)
    if not isinstance(definition, EventDefinition):
        return EventDefinition()
    step, names = _named(definition.step)
    episode, names = _named(_for_each_input(definition.episode, names))
    epoch, _ = _named(_for_each_input(definition.epoch, names))
    return replace(definition, step=step, episode=episode, epoch=epoch)


def define_step_stats(
    reduce_function: Callable[[Any], Any] | None,
    input_name: str | None = None,
    output_name: str | None = None,
    group_by: str | None = None,
    cumulative: bool = False,
) -> Callable[[EventMethod], EventMethod]:
    """Add a statistic over the events of an environment step.

    :param reduce_function: Reduces the list of values (`len`, `sum`, `np.mean`, ...) to one; `None` passes the
        values on unchanged.
    :param input_name: The event attribute to reduce. `None`: the only attribute that is not a grouping, or else the
        dictionary of all attributes.
    :param output_name: Name of the result.
    :param group_by: Calculate this statistic separately for each value of this attribute, instead of the grouping that
        :func:`define_stats_grouping` declares.
    :param cumulative: Reduce all values since the start of the run instead of those of the current step.
    """
    return _add("step", StatsDefinition(reduce_function, input_name, output_name, group_by, cumulative))


def define_episode_stats(
    reduce_function: Callable[[Any], Any] | None,
    input_name: str | None = None,
    output_name: str | None = None,
    group_by: str | None = None,
    cumulative: bool = False,
) -> Callable[[EventMethod], EventMethod]:
    """Add a statistic over the step statistics of one episode.

    A step without the event counts as 0 if the step statistic is a `len` or `sum`. An episode without the event has no
    statistics of it.

    :param reduce_function: Reduces the list of step statistics to one value; `None` passes them on unchanged.
    :param input_name: The `output_name` of the step statistic to reduce.
    :param output_name: Name of the result.
    :param group_by: Keep only this one of the attributes that the step statistics are grouped by.
    :param cumulative: Reduce all values since the start of the run instead of those of the current episode.
    """
    return _add("episode", StatsDefinition(reduce_function, input_name, output_name, group_by, cumulative))


def define_epoch_stats(
    reduce_function: Callable[[Any], Any] | None,
    input_name: str | None = None,
    output_name: str | None = None,
    group_by: str | None = None,
    cumulative: bool = False,
) -> Callable[[EventMethod], EventMethod]:
    """Add a statistic over the episode statistics of one epoch.

    An episode without the event counts as well if steps without it count as 0, or if the episode statistic is a `len`
    or `sum`: with the episode statistic of as many zeros as the episode had steps (0 for means, extremes and sums). The
    statistics of an epoch therefore depend on its episodes only, not on their distribution over environments. An event
    has a row from its first occurrence on.

    :param reduce_function: Reduces the list of episode statistics to one value; `None` passes them on unchanged.
    :param input_name: The `output_name` of the episode statistic to reduce.
    :param output_name: Name of the result, shown in the log.
    :param group_by: Keep only this one of the attributes that the episode statistics are grouped by.
    :param cumulative: Reduce all values since the start of the run (total counts), not only those of the epoch.
    """
    return _add("epoch", StatsDefinition(reduce_function, input_name, output_name, group_by, cumulative))


def define_stats_grouping(*group_by: str) -> Callable[[EventMethod], EventMethod]:
    """Calculate all statistics of the event separately for each combination of these attributes' values.

    :param group_by: Names of attributes of the event, whose values have to be hashable. Of several groupings of an
        event the topmost decorator applies.
    """

    def decorate(event: EventMethod) -> EventMethod:
        _own_definition(event).grouping = group_by
        return event

    return decorate


def define_mean_by(*groups: str, input_name: str | None = None) -> Callable[[EventMethod], EventMethod]:
    """Define the mean of an epoch, for each value of some attributes by itself.

    :param groups: Attributes that :func:`define_stats_grouping` groups by.
    :param input_name: See :func:`define_epoch_stats`.
    """

    def decorate(event: EventMethod) -> EventMethod:
        return define_epoch_stats(np.mean, input_name)(define_stats_grouping(*groups)(event))

    return decorate


def define_time(event: EventMethod, prefix: str = "mean_") -> EventMethod:
    """Define the means of an epoch of an event with the arguments `time` (seconds) and `percent`.

    :param event: The event's interface method, which is modified and returned.
    :param prefix: The statistics are called `<prefix>time` and `<prefix>percent`.
    """
    event = define_epoch_stats(np.mean, input_name="percent", output_name=f"{prefix}percent")(event)
    return define_epoch_stats(np.mean, input_name="time", output_name=f"{prefix}time")(event)


def define_plot(
    create_figure_function: Callable[..., Any], input_name: str | None = None
) -> Callable[[EventMethod], EventMethod]:
    """Draw a figure of an epoch statistic of the event in TensorBoard.

    :param create_figure_function: Receives the statistic's value and returns a matplotlib figure.
    :param input_name: The `output_name` of the epoch statistic to draw.
    """

    return _add("plots", PlotDefinition(create_figure_function, input_name))


def _add(level: str, definition: StatsDefinition | PlotDefinition) -> Callable[[EventMethod], EventMethod]:
    def decorate(event: EventMethod) -> EventMethod:
        getattr(_own_definition(event), level).append(definition)
        return event

    return decorate


def _own_definition(event: Callable[..., Any]) -> EventDefinition:
    definition: EventDefinition = vars(event).setdefault(_ATTRIBUTE, EventDefinition())
    return definition


# The names of the statistics that were defined with the same name.
_Names = dict[str | None, list[str | None]]


def _named(stats: list[StatsDefinition]) -> tuple[list[StatsDefinition], _Names]:
    """Return definitions with unique names, and the names by their original ones.

    Definitions with the same name get labels of their differences: inputs, groupings, functions and periods.
    """
    stats = list(dict.fromkeys(stats))
    by_name: dict[str | None, list[StatsDefinition]] = {}
    for stat in stats:
        by_name.setdefault(stat.output_name, []).append(stat)
    named: dict[StatsDefinition, StatsDefinition] = {}
    taken = {name for name, alike in by_name.items() if len(alike) == 1}
    for name, alike in by_name.items():
        rows = [_distinguishing(stat) for stat in alike]
        is_common = [len(set(column)) == 1 for column in zip(*rows, strict=True)]
        for stat, row in zip(alike, rows, strict=True):
            parts = [name, *("" if common else part for part, common in zip(row, is_common, strict=True))]
            label = own_name = "_".join(filter(None, parts)) or None
            while len(alike) > 1 and own_name in taken:
                own_name = f"{label or 'value'}_{len(taken)}"
            taken.add(own_name)
            named[stat] = replace(stat, output_name=own_name)
    names: _Names = {
        name: list(dict.fromkeys(named[stat].output_name for stat in alike)) for name, alike in by_name.items()
    }
    return [named[stat] for stat in stats], names


def _distinguishing(stat: StatsDefinition) -> tuple[str, ...]:
    function = getattr(stat.reduce_function, "__name__", "")
    return stat.input_name or "", stat.group_by or "", function, "cumulative" if stat.cumulative else ""


def _for_each_input(stats: list[StatsDefinition], names: _Names) -> list[StatsDefinition]:
    """Repeat a definition for each definition of the level below that has the name of its input."""
    return [
        replace(stat, input_name=input_name)
        for stat in stats
        for input_name in names.get(stat.input_name, [stat.input_name])
    ]
