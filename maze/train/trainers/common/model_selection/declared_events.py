"""Which events there are, whether they have occurred or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.log_stats.event_decorators import EventDefinition, event_definition


def is_declared(name: Sequence[str]) -> bool:
    """Whether an interface of this process declares an event with this epoch statistic.

    KPIs are no events: one that is missing is not calculated. Looks at every class, so ask once.

    :param name: Parts of the statistic's name: interface (if it is named), method, statistic (if it is named), groups.
    """
    return any(
        method is not BaseEnvEvents.kpi and _has_statistic(event_definition(method), rest)
        for interface in _all_classes()
        for method, rest in _methods(interface, name)
    )


def _methods(interface: type[Any], name: Sequence[str]) -> Iterator[tuple[Callable[..., Any], Sequence[str]]]:
    """What the name may mean in an interface: a method, and the parts that come after it."""
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
