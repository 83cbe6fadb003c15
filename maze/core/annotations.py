"""Annotations for readers and tools, without cost at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, get_origin

from maze.core.errors import did_you_mean

T = TypeVar("T")


def override(interface_class: Any) -> Callable[[T], T]:
    """Mark a method (or property) that implements or replaces a member of `interface_class`.

    The name is checked when the class body is executed, so a renamed interface method is noticed on import.

    :param interface_class: The class, or a parametrised generic such as `Wrapper[MazeEnv]`, that declares the member.
    """
    interface = get_origin(interface_class) or interface_class

    def check(member: T) -> T:
        function = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        name = getattr(function, "__name__", None)
        if name is not None and not hasattr(interface, name):
            hint = did_you_mean(name, dir(interface))
            raise NameError(f"@override: {interface.__name__} has no member `{name}`.{hint}")
        return member

    return check


def unused(*args: Any) -> None:
    """State that arguments an interface prescribes are not needed by this implementation."""
