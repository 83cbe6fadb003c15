"""Arrays in JSON: small ones as numbers, others as places in a block of bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.serve.archive import BundleError

Array = np.ndarray[Any, Any]

_DTYPES = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float32", "float64")
_MOST_INLINE = 64
_ALIGNMENT = 64


class ArrayWriter:
    """Turns arrays into JSON values; large ones go into `content`."""

    def __init__(self) -> None:
        self.content = bytearray()

    def stored(self, value: Any) -> Any:
        """The same with JSON values in place of arrays, at any depth."""
        if isinstance(value, Mapping):
            return {str(key): self.stored(entry) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.stored(entry) for entry in value]
        if isinstance(value, np.generic):
            return value.item()
        return self._array(value) if isinstance(value, np.ndarray) else value

    def _array(self, array: Array) -> dict[str, Any]:
        if array.dtype == np.float16:
            array = array.astype(np.float32)
        if array.dtype.name not in _DTYPES:
            raise BundleError(f"Arrays of {array.dtype} cannot be stored in a bundle.")
        place: dict[str, Any] = {"dtype": array.dtype.name, "shape": list(array.shape)}
        if array.size <= _MOST_INLINE and np.isfinite(array).all():
            return {**place, "values": array.reshape(-1).tolist()}
        self.content += bytes(-len(self.content) % _ALIGNMENT)
        offset = len(self.content)
        self.content += np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
        return {**place, "offset": offset}


def loaded(value: Any, content: bytes) -> Any:
    """Arrays, which cannot be written to, in place of what stands for them, at any depth.

    :param value: As :meth:`ArrayWriter.stored` gave it.
    :param content: The block of bytes.
    :raises BundleError: An array has another type than numbers, or lies outside the block.
    """
    if isinstance(value, list):
        return [loaded(entry, content) for entry in value]
    if not isinstance(value, dict):
        return value
    if value.keys() in ({"dtype", "shape", "values"}, {"dtype", "shape", "offset"}):
        try:
            return _loaded_array(value, content)
        except (TypeError, ValueError, OverflowError) as error:
            raise BundleError(f"An array cannot be read: {error}.") from error
    return {key: loaded(entry, content) for key, entry in value.items()}


def _loaded_array(place: Mapping[str, Any], content: bytes) -> Array:
    if place["dtype"] not in _DTYPES:
        raise ValueError(f"the type {place['dtype']!r} is none of {', '.join(_DTYPES)}")
    dtype, shape = np.dtype(place["dtype"]), tuple(int(size) for size in place["shape"])
    if any(size < 0 for size in shape):
        raise ValueError(f"the shape {shape} is negative")
    n_values = math.prod(shape)
    if "values" in place:
        array: Array = np.array(place["values"], dtype)
    else:
        offset = int(place["offset"])
        if offset < 0 or offset + n_values * dtype.itemsize > len(content):
            raise ValueError("it lies outside the file")
        array = np.frombuffer(content, dtype.newbyteorder("<"), n_values, offset)
    array = array.reshape(shape)
    array.flags.writeable = False
    return array
