"""Which parameters of a function take a configuration and build the object themselves."""

from __future__ import annotations

import collections.abc
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

_MAPPINGS = (dict, Mapping, collections.abc.MutableMapping, typing.Mapping, typing.MutableMapping)
_SEQUENCES = (list, tuple, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_CONFIGURATION_WORDS = re.compile(r"\b(CollectionOfConfigType|ConfigType|DictConfig|ListConfig|Mapping|Dict|dict)\b")


class ParameterHints:
    """The annotations of a function's or class's parameters.

    :param function: What is going to be called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        called: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        try:
            self._hints: dict[str, Any] = typing.get_type_hints(called)
        except Exception:
            # Annotations may name what is imported for type checkers only; they are then read as text.
            self._hints = {}
        self._texts = dict(getattr(called, "__annotations__", {}))
        self._rest = _name_of_keyword_rest(called)

    def takes_configuration(self, name: str) -> bool:
        """Whether the parameter wants a configuration as it is, because it is annotated with such a type."""
        key = name if name in self._texts else self._rest
        if key is None:
            return False
        if key in self._hints:
            return _is_configuration(self._hints[key])
        annotation = self._texts.get(key)
        if isinstance(annotation, str):
            return _CONFIGURATION_WORDS.search(annotation) is not None
        return _is_configuration(annotation)


def _is_configuration(hint: Any) -> bool:
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
