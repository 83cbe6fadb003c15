"""Recording of the events of one environment, and their scopes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, TypeVar, cast

from maze.core.events.event_record import EventRecord
from maze.core.events.event_topic_factory import event_topic_factory

T = TypeVar("T")


class EventScope(ABC):
    """Service that receives the events of its topics, such as :class:`Pubsub`."""

    @abstractmethod
    def notify_event(self, event: EventRecord) -> None:
        """Receive an event of one of this scope's topics, when it is fired.

        :param event: The record, which is shared with the event service.
        """

    @abstractmethod
    def clear_events(self) -> None:
        """Drop the events received so far, at the beginning of a step."""


class EventService:
    """Collect the events of the current step.

    Firing an event appends one record to :attr:`records`.
    """

    def __init__(self) -> None:
        self.records: list[EventRecord] = []
        """The events of the current step in the order in which they were fired. The list is never replaced."""
        self.topics: dict[type[Any], int] = {}
        """Position of each event interface in the order of creation."""
        self.on_clear: list[Callable[[list[EventRecord]], None]] = []
        """Functions that are called with the events of a step before they are dropped. Not pickled or copied."""
        self._scopes: list[EventScope] = []
        self._scopes_by_interface: dict[type[Any], list[EventScope]] = {}
        self._proxies: dict[type[Any], Any] = {}

    def notify_event(self, event: EventRecord) -> None:
        """Record an event and pass it to the scopes of its topic.

        :param event: The record. If its interface has no scope, it is recorded only.
        """
        self.records.append(event)
        for scope in self._scopes_by_interface.get(event.interface_class, ()):
            scope.notify_event(event)

    def iterate_event_records(self) -> Generator[EventRecord, None, None]:
        """Yield the events of the current step in the order in which they were fired."""
        yield from tuple(self.records)

    def create_event_topic(self, interface_class: type[T], scope: EventScope | None = None) -> T:
        """Return an object with the interface's methods that fire events of this service.

        Further calls with the same interface, for instance at each reset, return the same topic.

        :param interface_class: The event interface.
        :param scope: Receives the events of this interface, in addition to the scopes of earlier calls; `None`: no
            further one.
        :raises TypeError: A method of the interface has no `self`.
        """
        self.topics.setdefault(interface_class, len(self.topics))
        if scope is not None:
            for scopes in (self._scopes, self._scopes_by_interface.setdefault(interface_class, [])):
                if all(known is not scope for known in scopes):
                    scopes.append(scope)
        if interface_class not in self._proxies:
            self._proxies[interface_class] = event_topic_factory(interface_class, self.notify_event)
        return cast(T, self._proxies[interface_class])

    def clear_events(self) -> None:
        """Drop the events of the current step, also in all scopes."""
        if self.records:
            for see_events in self.on_clear:
                see_events(self.records)
            self.records.clear()
        for scope in self._scopes:
            scope.clear_events()

    def clone_from(self, service: EventService) -> None:
        """Take over the events of the current step of another environment; scopes are emptied.

        :param service: The other event service, which is not modified. Both share the records.
        """
        records = list(service.records)
        self.clear_events()
        self.records.extend(records)

    def clear_pubsub(self) -> None:
        """Drop all topics and scopes. Events of existing topics are still recorded, without scopes."""
        self.clear_events()
        self.topics.clear()
        self._scopes.clear()
        self._scopes_by_interface.clear()
        self._proxies.clear()

    def __getstate__(self) -> dict[str, Any]:
        # Listeners belong to this environment and register again for its copy.
        return {**self.__dict__, "on_clear": []}
