"""Creation of topics: objects of an event interface whose methods fire events.

Each interface class is compiled once to a class whose event methods are functions with the signatures of the interface,
so that Python binds positional arguments, keywords and defaults. Firing an event costs this call, one dictionary, one
record and the notification.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from functools import cache
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

from maze.core.events.event_record import EventRecord

T = TypeVar("T")
Notify = Callable[[EventRecord], None]


def event_topic_factory(interface_class: type[T], fn_notify_event: Notify) -> T:
    """Return an instance of the interface whose methods call `fn_notify_event` with an :class:`EventRecord`.

    :param interface_class: The event interface: a class with one method per event.
    :param fn_notify_event: Receives the record of every fired event.
    """
    topic_class: type[Any] = _topic_class(cast("Hashable", interface_class))
    topic = object.__new__(topic_class)
    topic.__dict__["_notify"] = fn_notify_event
    return cast(T, topic)


def event_methods(interface_class: type[Any]) -> dict[str, Callable[..., Any]]:
    """Return the events of an interface, those of base classes first.

    :param interface_class: The event interface.
    :return: Public methods by name; of overridden ones the method of the subclass.
    """
    return {
        name: member
        for base in reversed(interface_class.__mro__)
        for name, member in vars(base).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }


@cache
def _topic_class(interface_class: Any) -> type[Any]:
    members: dict[str, Any] = {
        name: _compile_event(interface_class, name, method) for name, method in event_methods(interface_class).items()
    }
    members["__reduce__"] = lambda topic: (event_topic_factory, (interface_class, topic.__dict__["_notify"]))
    members["__doc__"] = interface_class.__doc__
    members["__module__"] = interface_class.__module__
    metaclass: Callable[..., type[Any]] = type(interface_class)
    return metaclass(f"{interface_class.__name__}Topic", (interface_class,), members)


def _compile_event(interface_class: type[Any], name: str, method: Callable[..., Any]) -> Callable[..., None]:
    """Generate `def event(self, a, b): self._notify(EventRecord(interface, method, {"a": a, "b": b}))`."""
    signature = list(inspect.signature(method).parameters.values())
    if not signature:
        raise TypeError(f"Event {interface_class.__qualname__}.{name} has no `self`: define it as a method.")
    receiver, *parameters = signature
    this = receiver.name
    attributes = ", ".join(
        f"**{parameter.name}" if parameter.kind is Parameter.VAR_KEYWORD else f"{parameter.name!r}: {parameter.name}"
        for parameter in parameters
    )
    bare = Signature([p.replace(annotation=Parameter.empty, default=Parameter.empty) for p in signature])
    # Globals of the generated function have names that are not parameters.
    source = (
        f"def {name}{bare}:\n    {this}._notify(__maze_record(__maze_interface, __maze_method, {{{attributes}}}))\n"
    )
    namespace: dict[str, Any] = {
        "__maze_record": EventRecord,
        "__maze_interface": interface_class,
        "__maze_method": method,
    }
    exec(compile(source, f"<event {interface_class.__qualname__}.{name}>", "exec"), namespace)
    fire = namespace[name]
    fire.__defaults__, fire.__kwdefaults__ = method.__defaults__, method.__kwdefaults__
    fire.__doc__ = method.__doc__
    # Python's errors about wrong arguments name the event.
    fire.__qualname__ = f"{interface_class.__qualname__}.{name}"
    fire.__module__ = interface_class.__module__
    return cast("Callable[..., None]", fire)
