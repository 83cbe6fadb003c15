"""The record of one fired event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EventRecord:
    """One call of an event method: which interface, which method, with which arguments.

    :param interface_class: The event interface (topic) the event belongs to.
    :param interface_method: The method of that interface; it identifies the event.
    :param attributes: The arguments of the call by parameter name, defaults filled in.
    """

    __slots__ = ("attributes", "interface_class", "interface_method")

    def __init__(
        self, interface_class: type[Any], interface_method: Callable[..., Any], attributes: dict[str, Any]
    ) -> None:
        self.interface_class = interface_class
        self.interface_method = interface_method
        self.attributes = attributes

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.attributes.items())
        return f"{self.interface_class.__name__}.{self.interface_method.__name__}({arguments})"
