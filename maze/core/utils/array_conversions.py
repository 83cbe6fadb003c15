"""Pre-processing and normalisation of arrays, for training and for deployed policies.

A conversion is a dataclass of numbers and arrays, which can be stored and restored by :func:`conversion_of`. Only NumPy
is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import numpy as np

from maze.core.errors import EnvironmentContractError

Array = np.ndarray[Any, Any]

LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)
"""Weights of red, green and blue in the luma (ITU-R BT.601)."""


class ArrayConversion(Protocol):
    """Conversion of an array `[*space.shape]` to another one, without changing it."""

    def __call__(self, array: Array) -> Array:
        """Convert an array.

        :param array: `[*space.shape]`, which is not modified. The result may be a view of it.
        """


@dataclass(frozen=True, eq=False)
class Reshape:
    """Change of the shape."""

    shape: tuple[int, ...]

    def __call__(self, array: Array) -> Array:
        return array.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Transpose:
    """Change of the order of dimensions."""

    axes: tuple[int, ...]

    def __call__(self, array: Array) -> Array:
        return np.transpose(array, self.axes)


@dataclass(frozen=True, eq=False)
class OneHot:
    """Concatenated one-hot encodings of all entries.

    :param first: Smallest category of each entry.
    :param counts: Number of categories of each entry.
    """

    first: Array
    counts: Array

    def __call__(self, array: Array) -> Array:
        value = np.asarray(array).reshape(-1)
        category = value.astype(np.int64) - self.first
        if ((category < 0) | (category >= self.counts) | (category + self.first != value)).any():
            expected = f"{self.counts.tolist()} values from {self.first.tolist()} on"
            raise EnvironmentContractError(f"OneHotPreProcessor: expected {expected}, found {array!r}.")
        encoded = np.zeros(int(self.counts.sum()), dtype=np.float32)
        encoded[np.cumsum(self.counts) - self.counts + category] = 1.0
        return encoded


@dataclass(frozen=True, eq=False)
class _Image:
    """Base of conversions of images, whose results have the type and bounds of the original space.

    :param low: Smallest value.
    :param high: Largest value.
    """

    dtype: str
    low: float
    high: float

    def _inside(self, image: Array) -> Array:
        dtype = np.dtype(self.dtype)
        inside = np.rint(image) if dtype.kind in "iu" else np.clip(image, dtype.type(self.low), dtype.type(self.high))
        converted: Array = inside.astype(dtype, copy=False)
        return converted


@dataclass(frozen=True, eq=False)
class Resize(_Image):
    """Change of the size of an image.

    :param rows: Share of each old row in each new one, `[new, old]`.
    :param columns: The same for columns.
    :param has_channels_last: Whether the shape is `(height, width, channels)`.
    """

    rows: Array
    columns: Array
    has_channels_last: bool

    def __call__(self, array: Array) -> Array:
        image = np.asarray(array, dtype=np.float32)
        if self.has_channels_last:
            image = np.ascontiguousarray(image.transpose(2, 0, 1))
        resized = self.rows @ (image @ self.columns.T)
        if self.has_channels_last:
            resized = resized.transpose(1, 2, 0)
        return self._inside(resized)


@dataclass(frozen=True, eq=False)
class Gray(_Image):
    """Luma of an image with the channels red, green and blue.

    :param axis: The dimension of the channels.
    """

    axis: int

    def __call__(self, array: Array) -> Array:
        channels = np.moveaxis(array, self.axis, 0)
        gray = channels[0] * LUMA[0]
        gray += channels[1] * LUMA[1]
        gray += channels[2] * LUMA[2]
        return self._inside(gray)


@dataclass(frozen=True, eq=False)
class Normalize:
    """Subtract an offset, divide by a scale, and clip; the result is float32.

    :param offset: Offset, in the type of the calculation.
    :param scale: Scale, in the same type.
    :param smallest: Smallest result; None: no limit.
    :param largest: Largest result; None: no limit.
    """

    offset: Array
    scale: Array
    smallest: Array | None
    largest: Array | None

    def __call__(self, array: Array) -> Array:
        result = (np.asarray(array, self.offset.dtype) - self.offset) / self.scale
        if self.smallest is not None:
            result = np.maximum(result, self.smallest)
        if self.largest is not None:
            result = np.minimum(result, self.largest)
        return np.asarray(result, np.float32)


class Stack(NamedTuple):
    """Stack of the latest observations of an entry, the oldest first; the first one of an episode is repeated.

    :param source: Name of the entry.
    :param target: Name of the stack.
    :param keeps_original: Whether the entry stays beside it.
    :param is_delta: Whether all but the latest observation are replaced by the difference to their successor.
    :param n_steps: Number of observations.
    :param dtype: Type of the stack.
    """

    source: str
    target: str
    keeps_original: bool
    is_delta: bool
    n_steps: int
    dtype: np.dtype[Any]

    def add_to(self, entries: dict[str, Any], history: dict[tuple[Any, str], Array], actor: Any) -> None:
        """Add the stack to the entries of an observation.

        :param entries: The entries, which are modified.
        :param history: Latest observations `[n_steps, *shape]` by actor and target; its arrays are replaced.
        :param actor: The observing actor.
        """
        latest = np.asarray(entries[self.source] if self.keeps_original else entries.pop(self.source), self.dtype)
        steps = np.empty((self.n_steps, *latest.shape), self.dtype)
        past = history.get((actor, self.target))
        if past is None:
            steps[:] = latest
        else:
            steps[:-1] = past[1:]
            steps[-1] = latest
        history[actor, self.target] = steps
        entries[self.target] = stacked = steps.copy()
        if self.is_delta:
            np.subtract(steps[1:], steps[:-1], out=stacked[:-1])


_KINDS: Mapping[str, Any] = {
    "reshape": Reshape,
    "transpose": Transpose,
    "one_hot": OneHot,
    "resize": Resize,
    "gray": Gray,
    "normalize": Normalize,
}


def described(conversion: Any) -> dict[str, Any]:
    """Describe a conversion by its `kind` and its fields.

    :param conversion: A conversion of this module, not of a subclass.
    """
    kind = next(name for name, each in _KINDS.items() if type(conversion) is each)
    return {"kind": kind, **{field.name: getattr(conversion, field.name) for field in fields(conversion)}}


def conversion_of(description: Mapping[str, Any]) -> ArrayConversion:
    """Restore a conversion from the result of :func:`described`.

    :param description: The description; lists, as JSON has them, become tuples.
    :raises KeyError: There is no such kind.
    :raises TypeError: A field is missing or unknown.
    """
    arguments = {name: tuple(value) if isinstance(value, list) else value for name, value in description.items()}
    conversion: ArrayConversion = _KINDS[str(arguments.pop("kind"))](**arguments)
    return conversion
