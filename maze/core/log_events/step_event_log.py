"""The events of one environment step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord


class StepEventLog:
    """All events of one environment step.

    :param env_time: Number of environment steps completed before this one.
    :param events: The events; more can be added.
    """

    __slots__ = ("env_time", "events")

    def __init__(self, env_time: int, events: EventCollection | None = None) -> None:
        self.env_time = env_time
        self.events = EventCollection() if events is None else events

    def append(self, event: EventRecord) -> None:
        self.events.append(event)

    def extend(self, event_list: Iterable[EventRecord]) -> None:
        self.events.extend(event_list)

    def query_events(self, event_spec: Callable[..., object] | Iterable[Callable[..., object]]) -> list[EventRecord]:
        """Return the records of one event of this step, or of several.

        :param event_spec: The event's interface method, or several of them.
        """
        return self.events.query_events(event_spec)
