"""Decorators that define the statistics of an event on each level.

An event method has any number of definitions per level. Levels form a hierarchy: the events of an environment step are
reduced to step statistics, those of all steps to episode statistics, those of all episodes to epoch statistics.
`input_name` selects the input of a definition: on the step level an attribute of the event, above it the `output_name`
of the level below.

Definitions of one level have different names.

Definitions are stored on the function; :mod:`maze.core.log_stats.reduction` compiles them once per event. Rows appear
in the order in which the decorators are applied, that is from the method upwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from maze.core.errors import ConfigError

EventMethod = TypeVar("EventMethod", bound=Callable[..., Any])

_ATTRIBUTE = "__maze_event_stats__"


@dataclass(frozen=True)
class StatsDefinition:
    """Statistic of an event on one level."""

    reduce_function: Callable[[Any], Any] | None
    input_name: str | None
    output_name: str | None
    group_by: str | None
    cumulative: bool


@dataclass(frozen=True)
class PlotDefinition:
    """Figure of an epoch statistic of an event."""

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


def event_definition(event: Callable[..., Any]) -> EventDefinition:
    """Return the statistics defined for an event method; an event without definitions has an empty one."""
    definition: EventDefinition = getattr(event, _ATTRIBUTE, _NOTHING)
    return definition


_NOTHING = EventDefinition()


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


def define_mean_by(*groups: str, input_name: str | None = None) -> Callable[[EventMethod], EventMethod]:
    """Define the mean of an epoch, for each value of some attributes by itself.

    :param groups: Attributes that :func:`define_stats_grouping` groups by.
    :param input_name: See :func:`define_epoch_stats`.
    """

    def decorate(event: EventMethod) -> EventMethod:
        return define_epoch_stats(np.mean, input_name)(define_stats_grouping(*groups)(event))

    return decorate


def define_stats_grouping(*group_by: str) -> Callable[[EventMethod], EventMethod]:
    """Calculate all statistics of the event separately for each combination of these attributes' values."""

    def decorate(event: EventMethod) -> EventMethod:
        _own_definition(event).grouping = group_by
        return event

    return decorate


def define_plot(
    create_figure_function: Callable[..., Any], input_name: str | None = None
) -> Callable[[EventMethod], EventMethod]:
    """Draw a figure of an epoch statistic of the event in TensorBoard.

    :param create_figure_function: Receives the statistic's value and returns a matplotlib figure.
    :param input_name: The `output_name` of the epoch statistic to draw.
    """

    def decorate(event: EventMethod) -> EventMethod:
        _own_definition(event).plots.append(PlotDefinition(create_figure_function, input_name))
        return event

    return decorate


def _add(level: str, definition: StatsDefinition) -> Callable[[EventMethod], EventMethod]:
    def decorate(event: EventMethod) -> EventMethod:
        known: list[StatsDefinition] = getattr(_own_definition(event), level)
        if any(other.output_name == definition.output_name and other != definition for other in known):
            raise ConfigError(
                f"Event {event.__qualname__}: its {level} statistics must have different output names, found "
                f"{definition.output_name!r} twice."
            )
        if definition not in known:
            known.append(definition)
        return event

    return decorate


def _own_definition(event: Callable[..., Any]) -> EventDefinition:
    if not hasattr(event, _ATTRIBUTE):
        setattr(event, _ATTRIBUTE, EventDefinition())
    definition = getattr(event, _ATTRIBUTE)
    assert isinstance(definition, EventDefinition)
    return definition
