"""The class that an environment stack shows to `isinstance`."""

from __future__ import annotations

import copyreg
from abc import ABCMeta
from functools import lru_cache
from typing import Any


class WrapperMeta(ABCMeta):
    """Metaclass of wrappers: their classes, when shown, name the line that exports their environments.

    Other libraries refuse what is no gymnasium environment with a message that shows its class, and no other hint.
    """

    def __repr__(cls) -> str:
        path = f"{cls.__module__}.{cls.__qualname__}"
        return f"<class '{path}' (from maze.interop import to_gymnasium; env = to_gymnasium(env))>"


class _ClassViewMeta(ABCMeta):
    """Metaclass of views: their resolution order is given, not computed."""

    shown_mro: tuple[type, ...]
    real_type: type

    def mro(cls) -> list[type]:
        shown: tuple[type, ...] = cls.__dict__["shown_mro"]
        return [cls, *shown]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real_type(*args, **kwargs)


@lru_cache(maxsize=1024)
def class_view(outer: type, inner: type) -> type:
    """A class that is a subclass of everything `outer` and `inner` are subclasses of.

    :param outer: The wrapper's real class; comes first.
    :param inner: The class that the wrapped environment shows, itself a view where that is a wrapper too.
    """
    own = [klass for klass in outer.__mro__ if klass is not object]
    wrapped = [k for k in inner.__mro__ if k is not object and k not in own and not isinstance(k, _ClassViewMeta)]
    try:
        return _make_view(outer, (*own, *wrapped, object))
    except TypeError:
        # Classes with a memory layout of their own (slots, extension types) cannot stand in one order with others.
        return _make_view(outer, (*own, *(k for k in wrapped if _has_plain_layout(k)), object))


def _make_view(outer: type, mro: tuple[type, ...]) -> type:
    namespace = {
        "shown_mro": mro,
        "real_type": outer,
        "__module__": outer.__module__,
        "__qualname__": outer.__qualname__,
        "__doc__": outer.__doc__,
    }
    return _ClassViewMeta(outer.__name__, (), namespace)


def _has_plain_layout(klass: type) -> bool:
    try:
        _make_view(object, (klass, object))
    except TypeError:
        return False
    return True


def _identity(klass: type) -> type:
    return klass


def _reduce_view(view: _ClassViewMeta) -> tuple[Any, tuple[type]]:
    return _identity, (view.real_type,)


copyreg.pickle(_ClassViewMeta, _reduce_view)
