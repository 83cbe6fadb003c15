"""Classes and functions for the tests of the factory."""

from __future__ import annotations

from collections.abc import Mapping
from os import system as innocent_name  # noqa: F401 (is to be found and refused)
from typing import Any

from maze.core.utils.factory import ConfigType


class Shape:
    def __init__(self, size, colour="red"):
        self.size, self.colour = size, colour


class Circle(Shape):
    pass


class Drawing:
    """Wants objects."""

    def __init__(self, shape: Shape, others: list[Shape] | None = None, by_name: dict[str, Shape] | None = None):
        self.shape, self.others, self.by_name = shape, others, by_name


class Studio:
    """Builds its objects itself."""

    def __init__(self, shape: ConfigType, options: Mapping[str, Any] | None = None):
        self.shape, self.options = shape, options


class OwnStudio(Studio):
    """Passes its arguments on."""

    def __init__(self, shape, **kwargs):
        super().__init__(shape, **kwargs)


def make_circle(size):
    return Circle(size)


def make_number():
    return 3


def never():
    raise AssertionError("must not be called")


class ForTypeCheckers:
    """Some of its annotations name what is not there at run time."""

    def __init__(self, first: Missing[int] | Shape, second: missing.Type | ConfigType, dictionary: Shape | None = None):  # noqa: F821
        self.first, self.second, self.dictionary = first, second, dictionary
