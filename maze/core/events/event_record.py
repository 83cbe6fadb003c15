"""Record of a fired event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class EventRecord:
    """Call of an event method: interface, method and arguments.

    The arguments are attributes of the record as well: `event.value` is `event.attributes["value"]`.

    :param interface_class: The event interface (topic).
    :param interface_method: The method of the interface, which identifies the event.
    :param attributes: The arguments of the call by parameter name, including defaults.
    """

    __slots__ = ("attributes", "interface_class", "interface_method")

    def __init__(
        self, interface_class: type[Any], interface_method: Callable[..., Any], attributes: dict[str, Any]
    ) -> None:
        self.interface_class = interface_class
        self.interface_method = interface_method
        self.attributes = attributes

    @property
    def qualified_name(self) -> str:
        """Interface and method, separated by a dot."""
        return f"{self.interface_class.__name__}.{self.interface_method.__name__}"

    def __getattr__(self, name: str) -> Any:
        # Called for names that are not slots, and by copies before slots are set.
        if name in EventRecord.__slots__ or name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.attributes[name]
        except KeyError:
            raise AttributeError(
                f"The event {self.qualified_name} has no argument `{name}`. Known: {', '.join(self.attributes)}."
            ) from None

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.attributes.items())
        return f"{self.qualified_name}({arguments})"
