"""Collection of event records, with queries by event."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Iterable
from typing import Any

from maze.core.events.event_record import EventRecord


class EventCollection(UserList[EventRecord]):
    """List of event records in the order in which they were fired."""

    def query_events(self, event_spec: Callable[..., Any] | Iterable[Callable[..., Any]]) -> list[EventRecord]:
        """Return the records of one event, or of several in the order in which they were fired.

        :param event_spec: The event's interface method, such as `BaseEnvEvents.reward`, or several of them.
        """
        methods = {event_spec} if callable(event_spec) else frozenset(event_spec)
        return [event for event in self.data if event.interface_method in methods]
