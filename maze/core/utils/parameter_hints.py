"""Which parameters of a function take a configuration and build the object themselves."""

from __future__ import annotations

import builtins
import collections.abc
import inspect
import typing
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

TAKES_CONFIGURATION = "takes a configuration"
"""Marks a type, as `Annotated[..., TAKES_CONFIGURATION]`: who is annotated with it builds the object himself."""

_MAPPINGS = (dict, Mapping, collections.abc.MutableMapping, typing.Mapping, typing.MutableMapping)
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)


_MARKED = typing.Annotated[Any, TAKES_CONFIGURATION]
_OFTEN_FOR_TYPE_CHECKERS: Mapping[str, Any] = {
    **dict.fromkeys(("ConfigType", "CollectionOfConfigType", "DictConfig", "ListConfig"), _MARKED),
    "Mapping": Mapping,
    "Dict": dict,
}
"""Types for configurations that modules often import for type checkers only."""


class ParameterHints:
    """The annotations of a function's or class's parameters.

    :param function: What is going to be called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        called: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        self._annotations: dict[str, Any] = dict(getattr(called, "__annotations__", {}))
        self._names = _Names(getattr(inspect.unwrap(called), "__globals__", {}))
        self._rest = _name_of_keyword_rest(called)

    def takes_configuration(self, name: str) -> bool:
        """Whether the parameter wants a configuration as it is, because it is annotated with such a type."""
        key = name if name in self._annotations else self._rest
        if key not in self._annotations:
            return False
        annotation = self._annotations[key]
        return _is_configuration(self._names.evaluate(annotation) if isinstance(annotation, str) else annotation)


class _Unknown(type):
    """Stands for what is imported for type checkers only."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, _: Any) -> Any:
        return cls


class _UnknownType(metaclass=_Unknown):
    pass


class _Names(dict[str, Any]):
    """Names in an annotation: those of its module, Python's own, and a stand-in for what is not there at run time."""

    def __init__(self, module: Mapping[str, Any]) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> Any:
        if name in self._module:
            return self._module[name]
        return getattr(builtins, name, _OFTEN_FOR_TYPE_CHECKERS.get(name, _UnknownType))

    def evaluate(self, annotation: str) -> Any:
        try:
            return eval(annotation, {}, self)
        except Exception:  # no type at all
            return None


def _is_configuration(hint: Any) -> bool:
    if TAKES_CONFIGURATION in getattr(hint, "__metadata__", ()):
        return True
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is typing.Union or origin is UnionType:
        return any(_is_configuration(option) for option in arguments)
    if hint in _MAPPINGS or getattr(hint, "__module__", "").startswith("omegaconf"):
        return True
    if origin in _MAPPINGS:
        # A dictionary of objects wants them built; one of anything, or of configurations, does not.
        return not arguments or arguments[-1] is Any or _is_configuration(arguments[-1])
    if origin in _SEQUENCES:
        return any(_is_configuration(argument) for argument in arguments)
    return False


def _name_of_keyword_rest(function: Callable[..., Any]) -> str | None:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
