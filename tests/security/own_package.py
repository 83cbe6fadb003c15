"""A user's package: classes that only store data, and others that files refer to."""

from __future__ import annotations

import enum
import os
import subprocess
from dataclasses import dataclass, field
from os import system  # noqa: F401 - a name that leads elsewhere
from subprocess import Popen  # noqa: F401
from typing import Any, NamedTuple


class Colour(enum.Enum):
    RED = "red"
    BLUE = (1, 2)


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Stock:
    level: int
    orders: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        os.system("constructors are not called")

    class Shelf:
        def __init__(self) -> None:
            os.system("constructors are not called")


@dataclass(frozen=True, slots=True)
class Order:
    number: int
    colour: Any


class Position(NamedTuple):
    x: int
    y: int


class Plain:
    __slots__ = ("__dict__", "a")


def act(*_: Any) -> Any:
    """Shows that code of the package has run, to the watch of the attack and to tests."""
    os.system("exit 1")


class Removes(Plain):
    def __del__(self) -> None:
        act()


class Restores:
    def __setstate__(self, state: Any) -> None:
        act(state)


class Makes:
    def __new__(cls, *arguments: Any) -> Makes:
        act(arguments)
        return super().__new__(cls)


class Reduces:
    def __reduce__(self) -> Any:
        return act, (1,)


class Looks:
    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        return act(name)


class Sees:
    def __getattribute__(self, name: str) -> Any:
        return act(name)


class Hashes:
    def __hash__(self) -> int:
        act()
        return 1


class Meta(type):
    def __call__(cls, *arguments: Any) -> Any:
        return act(arguments)


class Metaphysical(metaclass=Meta):
    pass


class Missing(enum.Enum):
    ONE = 1

    @classmethod
    def _missing_(cls, value: Any) -> Any:
        return act(value)


class HashedMember(enum.Enum):
    ONE = 1

    def __hash__(self) -> int:
        act()
        return 1


class Process(subprocess.Popen):  # type: ignore[type-arg]
    """Has a `__del__` that it inherits."""


class Numbers(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        act(key, value)


STORING = ("Stock", "Stock.Shelf", "Order", "Position", "Plain", "Colour", "Level", "Hashes", "Reduces", "Missing")
"""Those whose instances may be filled; nothing of them is run."""
OTHERS = ("Removes", "Restores", "Makes", "Looks", "Sees", "Metaphysical", "HashedMember", "Process", "Numbers")
NAMES = (*STORING, *OTHERS, "act", "system", "Popen", "subprocess.Popen", "os.system", "Stock.__init__", "Meta")
