"""Pickling for other processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import cloudpickle

from maze.core.errors import ConfigError


def pickled(value: Any, what: str) -> bytes:
    """Pickle an object for another process or machine.

    :param value: The object.
    :param what: Its name, for messages.
    :raises ConfigError: It cannot be pickled; the message names the attribute that prevents it.
    """
    try:
        content: bytes = cloudpickle.dumps(value)
    except Exception as error:  # pickling runs code of the objects, which may raise anything
        raise ConfigError(
            f"{what} cannot be sent to other processes: {unpicklable(value)} ({type(error).__name__}: {error}). Make "
            "it in the constructor there (pass a configuration, or a function that does so), or leave it out in "
            "`__getstate__`."
        ) from error
    return content


def unpicklable(value: Any, path: str = "") -> str:
    """Name the innermost attribute that cannot be pickled.

    :param value: An object that cannot be pickled.
    :param path: Its attribute path.
    """
    name = f"{path} ({type(value).__name__})" if path else type(value).__name__
    parts: dict[str, Any] = {}
    if isinstance(value, dict):
        parts = {f"{path}[{key!r}]": part for key, part in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"{path}[{index}]": part for index, part in enumerate(value)}
    elif isinstance(value, partial):
        named = {f"{path}({key}=...)": part for key, part in value.keywords.items()}
        parts = {**{f"{path}({index})": part for index, part in enumerate(value.args)}, **named}
    elif getattr(value, "__closure__", None):
        names = value.__code__.co_freevars
        parts = {f"{path}.{key}": cell.cell_contents for key, cell in zip(names, value.__closure__, strict=True)}
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        parts = {f"{path}.{key}": part for key, part in vars(value).items()}
    for part_path, part in parts.items():
        if not _is_picklable(part):
            return unpicklable(part, part_path.lstrip("."))
    return name


def _is_picklable(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # pickling runs code of the objects, which may raise anything
        return False
    return True
