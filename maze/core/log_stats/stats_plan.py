"""Compiles an event's decorators into a plan: where values go, and how they are reduced.

Done once per event and level; adding a value is then a dictionary look-up and an append.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from maze.core.errors import ConfigError
from maze.core.log_stats.event_decorators import EventDefinition, StatsDefinition, event_definition

Reducer = Callable[[Any], Any]

_LEVELS = ("step", "episode", "epoch")
_COUNTS_OCCURRENCES: tuple[Reducer | None, ...] = (len, sum, np.sum)
"""Reducers for which "did not occur" is the number 0."""

_ASKS_FOR_OCCURRENCES: tuple[Reducer | None, ...] = (None, len)
"""Reducers that ask which values there were, or how many: zeros for absent occurrences would be wrong."""

_ZERO_OF_ZEROS: tuple[Reducer | None, ...] = (
    *(len, sum, min, max, statistics.mean, statistics.median),
    *(np.sum, np.mean, np.median, np.min, np.max, np.std, np.var),
)
"""Reducers whose result for an absent event is the number 0, however long the period."""


class PassedThrough(list[Any]):
    """Several values of one statistic that no function reduced; the level above takes them one by one."""


@dataclass(frozen=True)
class CompiledStat:
    """One statistic of an event on one level.

    :param position: Index among the event's statistics of this level; rows are ordered by it.
    :param counts_absence: A period of the level below without the event counts as well.
    :param of_absence: What makes its value from the zeros of its own periods; `None`: the value is 0.
    """

    position: int
    reduce_function: Reducer | None
    input_name: str | None
    output_name: str | None
    cumulative: bool
    counts_absence: bool
    of_absence: Reducer | None


@dataclass(frozen=True)
class Variant:
    """The statistics of an event on one level that share their grouping."""

    group_by: str | None
    stats: tuple[CompiledStat, ...]


@dataclass(frozen=True)
class LevelPlan:
    """What one level does with an event.

    :param variants: One per grouping in use; nearly always a single one.
    :param grouping: Attributes that the event is grouped by.
    :param routes: For the output name of the level below: the variants that take it, each with the component of the
        incoming group to keep (`None`: the whole group).
    """

    variants: tuple[Variant, ...]
    grouping: tuple[str, ...]
    routes: dict[str | None, tuple[tuple[int, int | None], ...]]


@cache
def level_plan(event: Callable[..., Any], level: str) -> LevelPlan:
    """The plan of an event on one level.

    :param event: The event's interface method.
    :param level: "step", "episode" or "epoch".
    """
    definition = event_definition(event)
    own: list[StatsDefinition] = getattr(definition, level)
    lower = _level_below(definition, level)
    lowest = definition.step if level == "epoch" else []
    by_grouping: dict[str | None, list[CompiledStat]] = {}
    for position, stat in enumerate(own):
        by_grouping.setdefault(stat.group_by, []).append(_compile(position, stat, lower, lowest))
    variants = tuple(Variant(group_by, tuple(stats)) for group_by, stats in by_grouping.items())
    routes = {
        name: tuple(
            (index, _component(event, definition, level, variant.group_by, name))
            for index, variant in enumerate(variants)
            if any(stat.input_name == name for stat in variant.stats)
        )
        for name in dict.fromkeys(stat.input_name for stat in own)
    }
    return LevelPlan(variants, definition.grouping, routes)


def stat_value(event: Callable[..., Any], plan: LevelPlan, attributes: dict[str, Any], input_name: str | None) -> Any:
    """What a fired event contributes to a statistic: one attribute, or all that it is not grouped by.

    :param input_name: The attribute's name; `None`: the only one that the event is not grouped by.
    :raises ConfigError: The event has no such attribute.
    """
    if input_name is not None:
        try:
            return attributes[input_name]
        except KeyError:
            raise ConfigError(
                f"Event {event.__qualname__}: a statistic reduces `input_name={input_name!r}`, but the event has only "
                f"the attributes {', '.join(attributes) or '(none)'}."
            ) from None
    if plan.grouping:
        attributes = {name: value for name, value in attributes.items() if name not in plan.grouping}
    return next(iter(attributes.values())) if len(attributes) == 1 else attributes


def group_of(
    event: Callable[..., Any], plan: LevelPlan, variant: Variant, attributes: dict[str, Any]
) -> tuple[Any, ...] | None:
    """The group that a fired event belongs to; `None` without grouping.

    :raises ConfigError: The event has not all of the attributes that it is grouped by.
    """
    names = plan.grouping if variant.group_by is None else (variant.group_by,)
    if not names:
        return None
    try:
        return tuple(attributes[name] for name in names)
    except KeyError as missing:
        raise ConfigError(
            f"Event {event.__qualname__} is grouped by {missing}, which is not one of its attributes: "
            f"{', '.join(attributes) or '(none)'}."
        ) from None


def _level_below(definition: EventDefinition, level: str) -> list[StatsDefinition]:
    position = _LEVELS.index(level)
    return [] if position == 0 else getattr(definition, _LEVELS[position - 1])


def _compile(
    position: int, stat: StatsDefinition, lower: list[StatsDefinition], lowest: list[StatsDefinition]
) -> CompiledStat:
    below = _input_of(stat, lower)
    counts = below is not None and below.reduce_function in _COUNTS_OCCURRENCES
    of_absence = None
    if below is not None and not counts and below.reduce_function is not None:
        # Its own periods without the event were zeros to it, so it has a value even if there was no other period.
        source = _input_of(below, lowest)
        counts = source is not None and source.reduce_function in _COUNTS_OCCURRENCES
        of_absence = None if below.reduce_function in _ZERO_OF_ZEROS else below.reduce_function
    zeros_are_neutral = of_absence is None and stat.reduce_function in (sum, np.sum)
    return CompiledStat(
        position=position,
        reduce_function=stat.reduce_function,
        input_name=stat.input_name,
        output_name=stat.output_name,
        cumulative=stat.cumulative,
        counts_absence=counts and stat.reduce_function not in _ASKS_FOR_OCCURRENCES and not zeros_are_neutral,
        of_absence=of_absence,
    )


def _input_of(stat: StatsDefinition, lower: list[StatsDefinition]) -> StatsDefinition | None:
    return next((below for below in lower if below.output_name == stat.input_name), None)


def _component(
    event: Callable[..., Any], definition: EventDefinition, level: str, group_by: str | None, input_name: str | None
) -> int | None:
    """Which component of an incoming group a variant keeps."""
    if group_by is None or level == "step":
        return None
    below = next((stat for stat in _level_below(definition, level) if stat.output_name == input_name), None)
    if below is None:
        return None  # values arrive from fired events, which bring their attributes
    incoming = definition.grouping if below.group_by is None else (below.group_by,)
    if group_by not in incoming:
        raise ConfigError(
            f"Event {event.__qualname__}: its {level} statistics are grouped by {group_by!r}, but the values that "
            f"arrive there are grouped by {', '.join(incoming) or 'nothing'}. Add {group_by!r} to "
            f"`define_stats_grouping`."
        )
    return incoming.index(group_by)
