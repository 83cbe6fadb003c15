"""Collection of event records, with queries by event."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from maze.core.events.event_record import EventRecord


class EventCollection:
    """Event records in the order in which they were fired, indexed by event method.

    :param events: The records to start with.
    """

    __slots__ = ("_positions", "events")

    def __init__(self, events: Iterable[EventRecord] = ()) -> None:
        self.events: list[EventRecord] = list(events)
        # Built by the first query; most collections are never queried.
        self._positions: dict[Callable[..., Any], list[int]] | None = None

    def append(self, event: EventRecord) -> None:
        if self._positions is not None:
            self._positions.setdefault(event.interface_method, []).append(len(self.events))
        self.events.append(event)

    def extend(self, event_list: Iterable[EventRecord]) -> None:
        for event in event_list:
            self.append(event)

    def clear(self) -> None:
        self.events.clear()
        self._positions = None

    def query_events(self, event_spec: Callable[..., Any] | Iterable[Callable[..., Any]]) -> list[EventRecord]:
        """Return the records of one event, or of several in the order in which they were fired.

        :param event_spec: The event's interface method, such as `BaseEnvEvents.reward`, or several of them.
        """
        positions = self._index()
        if callable(event_spec):
            return [self.events[position] for position in positions.get(event_spec, ())]
        found = {position for event in event_spec for position in positions.get(event, ())}
        return [self.events[position] for position in sorted(found)]

    def _index(self) -> dict[Callable[..., Any], list[int]]:
        if self._positions is None:
            self._positions = {}
            for position, event in enumerate(self.events):
                self._positions.setdefault(event.interface_method, []).append(position)
        return self._positions

    def __len__(self) -> int:
        return len(self.events)

    def __iter__(self) -> Iterator[EventRecord]:
        return iter(self.events)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        # Without the index, which is rebuilt by the next query.
        return None, {"events": self.events, "_positions": None}

    def __repr__(self) -> str:
        return f"EventCollection({self.events!r})"
