"""Collection of event records, with queries by event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maze.core.events.event_record import EventRecord


class EventCollection:
    """Event records in the order in which they were fired.

    :param events: The records to start with.
    """

    __slots__ = ("events",)

    def __init__(self, events: Iterable[EventRecord] = ()) -> None:
        self.events: list[EventRecord] = list(events)

    def append(self, event: EventRecord) -> None:
        self.events.append(event)

    def extend(self, event_list: Iterable[EventRecord]) -> None:
        self.events.extend(event_list)

    def clear(self) -> None:
        self.events.clear()

    def query_events(self, event_spec: Callable[..., Any] | Iterable[Callable[..., Any]]) -> list[EventRecord]:
        """Return the records of one event, or of several in the order in which they were fired.

        :param event_spec: The event's interface method, such as `BaseEnvEvents.reward`, or several of them.
        """
        if callable(event_spec):
            return [event for event in self.events if event.interface_method is event_spec]
        methods = frozenset(event_spec)
        return [event for event in self.events if event.interface_method in methods]

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[EventRecord]:
        return iter(self.events)

    def __repr__(self) -> str:
        return f"EventCollection({self.events!r})"
