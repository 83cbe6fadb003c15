"""Reduce functions for the statistics decorators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, ValuesView
from typing import Any

import numpy as np

_NUMBERS = (int, float, bool)


def histogram(values: Sequence[Any]) -> list[Any] | tuple[list[Any], int]:
    """Return all values, so that writers can show their distribution.

    Nested lists and arrays, as from the levels below, are flattened. For values with a number of categories (such as
    the attributes `value` and `action_dim` of an event), the result is the pair of all values and that number.

    :param values: Numbers, lists of numbers, or attributes of events with one or two values each.
    """
    first = values[0]
    if type(first) in _NUMBERS:  # checks of abstract classes are slow
        return list(values)
    if isinstance(first, list) or (isinstance(first, np.ndarray) and first.ndim):
        joined: list[Any] = []
        for part in values:
            joined += _listed(part) if isinstance(part, np.ndarray) else part
        return joined
    if not isinstance(first, (tuple, np.ndarray, ValuesView, Mapping)):
        return list(values)
    parts = [_parts(value) for value in values]
    flat = [value for part, _ in parts for value in part]
    sizes = [size for _, size in parts if size is not None]
    return flat if not sizes else (flat, max(sizes))


def _listed(array: np.ndarray) -> Iterable[Any]:
    return array.tobytes() if array.dtype == np.uint8 and array.ndim == 1 else array.tolist()  # three times as fast


def _parts(value: Any) -> tuple[Iterable[Any], int | None]:
    if isinstance(value, np.ndarray):
        return (value.tolist() if value.ndim else [value.item()]), None
    if isinstance(value, Mapping):
        value = tuple(value.values())
    items = tuple(value)
    if len(items) == 2 and not isinstance(value, list):
        first, size = items
        return (first if isinstance(first, list) else [first]), int(size)
    return items, None
