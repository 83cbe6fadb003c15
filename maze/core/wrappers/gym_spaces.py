"""Conversion between gymnasium's spaces and flat dictionary spaces.

Leaves (Box, Discrete, MultiDiscrete, MultiBinary) become entries of the dictionary; a Dict keeps its keys, entries of a
Tuple are numbered, other spaces become a single entry.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.space_arrays import Cast
from maze.core.errors import ConfigError

_SUPPORTED = "Box, Discrete, MultiDiscrete and MultiBinary, alone or directly inside a Dict or a Tuple, are supported"


class Leaf:
    """Conversion of one entry: by default a cast between array types.

    :param space: The space of the gymnasium environment.
    :param place: Environment and key, for messages.
    """

    def __init__(self, space: spaces.Space[Any], place: str = "action") -> None:
        self.space: spaces.Space[Any] = _in_single_precision(space) if isinstance(space, spaces.Box) else space
        self.dtype = self.space.dtype
        self.gym_dtype = space.dtype
        self.cast = Cast(np.dtype(self.dtype), place)

    def to_gym(self, value: Any) -> Any:
        return np.asarray(value, dtype=self.gym_dtype)

    def from_gym(self, value: Any) -> np.ndarray:
        return self.cast(value)

    def batch_to_gym(self, values: np.ndarray) -> np.ndarray:
        """Return the values of several environments, `[n_envs, ...]`."""
        converted: np.ndarray = self.to_gym(values)
        return converted


class DiscreteAction(Leaf):
    """Conversion of a Discrete action: the agent counts from zero, gymnasium from `start`, as an integer."""

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__(zero_based(space))
        self.start = int(space.start)

    def to_gym(self, value: Any) -> int:
        if value.__class__ is np.ndarray:
            value = value.item()
        return operator.index(value) + self.start

    def from_gym(self, value: Any) -> np.ndarray:
        """Return a number, `[]`."""
        return np.asarray(value - self.start, dtype=self.dtype)

    @override(Leaf)
    def batch_to_gym(self, values: np.ndarray) -> np.ndarray:
        return values + self.start if self.start else values


def zero_based(space: spaces.Discrete) -> spaces.Discrete:
    """Return a space with the same number of choices and type, counted from zero."""
    # gymnasium 1.2 has no argument for the type, which is int64
    typed: dict[str, Any] = {} if space.dtype == np.int64 else {"dtype": space.dtype}
    return spaces.Discrete(int(space.n), **typed)


class MultiDiscreteAction(Leaf):
    """Conversion of a MultiDiscrete action: the agent counts from zero, gymnasium from `start`."""

    def __init__(self, space: spaces.MultiDiscrete) -> None:
        super().__init__(spaces.MultiDiscrete(space.nvec, dtype=space.dtype))
        self.start = np.asarray(space.start, dtype=space.dtype)

    def to_gym(self, value: Any) -> np.ndarray:
        """Return `[n_heads]`, counted from the start of the original space."""
        return np.asarray(value, dtype=self.gym_dtype) + self.start

    def from_gym(self, value: Any) -> np.ndarray:
        """Return `[n_heads]`, counted from zero."""
        return np.asarray(value - self.start, dtype=self.dtype)


class DoubleBoxAction(Leaf):
    """Conversion of a Box action in double precision, clipped to bounds that single precision may round beyond."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        self.low = space.low
        self.high = space.high

    def to_gym(self, value: Any) -> np.ndarray:
        """Return `[*space.shape]`."""
        action = np.asarray(value, dtype=self.gym_dtype)
        clipped: np.ndarray = np.minimum(np.maximum(action, self.low), self.high)
        return clipped


def action_leaves(space: spaces.Space[Any]) -> tuple[type | None, dict[str, Leaf]]:
    """Return conversions of an action space.

    :return: Container of the entries in gymnasium (`dict`, `tuple`, `None`: a single entry), and the entries.
    """
    kind, entries = _entries(space, "action")
    return kind, {key: _action_leaf(entry) for key, entry in entries.items()}


def observation_leaves(space: spaces.Space[Any], env_name: str) -> tuple[type | None, dict[str, Leaf]]:
    """Return conversions of an observation space; the result is that of :func:`action_leaves`.

    :param space: The space.
    :param env_name: The environment, for messages.
    """
    kind, entries = _entries(space, "observation")
    return kind, {key: Leaf(entry, f"{env_name}, observation `{key}`") for key, entry in entries.items()}


def packed(kind: type | None, parts: dict[str, Any]) -> Any:
    """Return the entries in gymnasium's container.

    :param kind: As of :func:`action_leaves`.
    :param parts: The entries by key, in the order of the space.
    """
    if kind is None:
        return next(iter(parts.values()))
    return parts if kind is dict else tuple(parts.values())


def unpacked(kind: type | None, leaves: Mapping[str, Leaf], value: Any) -> dict[str, np.ndarray]:
    """Return the converted entries, of one environment or of several, `[n_envs, ...]`.

    :param kind: As of :func:`observation_leaves`.
    :param leaves: Conversions of the entries.
    :param value: Value in gymnasium.
    """
    return {key: leaves[key].from_gym(part) for key, part in parts_of(kind, leaves, value)}


def parts_of(kind: type | None, keys: Iterable[str], value: Any) -> Iterable[tuple[str, Any]]:
    """Return the entries of a value of gymnasium by key, in the order of the keys.

    :param kind: As of :func:`entries_of`.
    :param keys: Keys of the entries.
    :param value: Value in gymnasium.
    """
    if kind is dict:
        return ((key, value[key]) for key in keys)
    return zip(keys, (value,) if kind is None else value, strict=True)


def entries_of(space: spaces.Space[Any], name: str) -> tuple[type | None, dict[str, spaces.Space[Any]]]:
    """Return the entries of a space by key.

    :param space: The space.
    :param name: `action` or `observation`: the key of a single space; those of a Tuple are numbered.
    :return: Container of the entries in gymnasium (`dict`, `tuple`, `None`: a single entry), and the entries.
    """
    if isinstance(space, spaces.Dict):
        return dict, dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return tuple, {f"{name}_{index}": entry for index, entry in enumerate(space.spaces)}
    return None, {name: space}


def _action_leaf(space: spaces.Space[Any]) -> Leaf:
    if isinstance(space, spaces.Discrete):
        return DiscreteAction(space)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiDiscreteAction(space)
    if isinstance(space, spaces.Box) and space.dtype == np.float64:
        return DoubleBoxAction(space)
    return Leaf(space)


def _entries(space: spaces.Space[Any], name: str) -> tuple[type | None, dict[str, spaces.Space[Any]]]:
    kind, entries = entries_of(space, name)
    if not all(isinstance(key, str) for key in entries):
        raise ConfigError(f"The {name} space has keys that are not strings: {list(entries)}. Rename them.")
    for key, entry in entries.items():
        _check_leaf(entry, f"{name} space" if kind is None else f"{name} space, entry `{key}`")
    return kind, entries


def _check_leaf(space: Any, where: str) -> None:
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return
    advice = "Convert it to one of these with a gymnasium wrapper."
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        advice = "Nested containers are not supported: move each entry to the outermost Dict."
    elif not isinstance(space, spaces.Space):
        advice = (
            "It is no gymnasium space. An environment of the older `gym` package can be converted by the package "
            "`shimmy` first."
        )
    raise ConfigError(f"The {where} is {space!r}, which Maze cannot use. {_SUPPORTED}. {advice}")


def _in_single_precision(space: spaces.Box) -> spaces.Box:
    if space.dtype != np.float64:
        return space
    with np.errstate(over="ignore"):  # bounds beyond the range of float32 become infinite
        return spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
