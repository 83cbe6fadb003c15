"""Publish and subscribe: events are passed to the subscribers of their interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from maze.core.annotations import override
from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.events.event_service import EventScope, EventService

T = TypeVar("T")


class Subscriber(ABC):
    """Collect the events of the declared interfaces; they can be queried until the next step begins."""

    def __init__(self) -> None:
        self.events = EventCollection()

    @abstractmethod
    def get_interfaces(self) -> list[type[Any]]:
        """Return the event interfaces to receive."""

    def notify_event(self, event: EventRecord) -> None:
        """Receive one event of a declared interface, when it is fired.

        :param event: The record, which is shared with the event service and other subscribers.
        """
        self.events.append(event)

    def reset(self) -> None:
        """Drop the events received so far."""
        self.events.clear()

    def query_events(self, event_spec: Callable[..., Any] | Iterable[Callable[..., Any]]) -> list[EventRecord]:
        """Return the received records of one event method or of several, in the order in which they were fired.

        :param event_spec: The event's interface method, or several of them.
        """
        return self.events.query_events(event_spec)


class Pubsub(EventScope):
    """Message broker of a core environment.

    :param event_collector: The event service that records all events, usually `self.context.event_service`.
    """

    def __init__(self, event_collector: EventService) -> None:
        self._event_collector = event_collector
        self._subscribers: list[Subscriber] = []
        self._subscribers_by_interface: dict[type[Any], list[Subscriber]] = {}

    def create_event_topic(self, interface_class: type[T]) -> T:
        """Return a topic whose events are passed to the subscribers and the event service.

        :param interface_class: The event interface: a class with one method per event.
        :return: Object with the methods of the interface; calling one of them fires the event. Further calls with the
            same interface return the same object.
        """
        return self._event_collector.create_event_topic(interface_class, scope=self)

    def register_subscriber(self, new_subscriber: Subscriber) -> None:
        """Pass the events of the subscriber's interfaces to it, from now on.

        :param new_subscriber: The subscriber. Its :meth:`~Subscriber.get_interfaces` is called once, here. The topics
            of the interfaces may be created later. A second registration has no effect.
        """
        by_interface = (self._subscribers_by_interface.setdefault(key, []) for key in new_subscriber.get_interfaces())
        for subscribers in (self._subscribers, *by_interface):
            if all(known is not new_subscriber for known in subscribers):
                subscribers.append(new_subscriber)

    @override(EventScope)
    def clear_events(self) -> None:
        for subscriber in self._subscribers:
            subscriber.reset()

    @override(EventScope)
    def notify_event(self, event: EventRecord) -> None:
        for subscriber in self._subscribers_by_interface.get(event.interface_class, ()):
            subscriber.notify_event(event)
