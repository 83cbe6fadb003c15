"""Values of gymnasium environments: results of `reset` and `step`, and conversions of actions and observations."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.space_values import Cast
from maze.core.errors import ConfigError, EnvironmentContractError

LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces of single entries."""


def reset_values(result: Any) -> tuple[Any, dict[str, Any]]:
    """Return the first observation and `info`, which is empty if `reset` returns the observation only.

    :param result: Result of `reset`.
    """
    is_pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
    return result if is_pair else (result, {})


def step_values(env: Any, result: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
    """Return the five values of gymnasium's current API, converted from the four of the older one if necessary.

    :param env: The environment, for messages.
    :param result: Result of `step`.
    :raises EnvironmentContractError: It has another number of values.
    """
    n_values = len(result) if isinstance(result, tuple | list) else 1
    if n_values == 5:
        return result  # type: ignore[no-any-return]
    if n_values != 4:
        raise EnvironmentContractError(
            f"{gym_env_name(env)}: expected five values from `step` (observation, reward, terminated, truncated, info) "
            f"or the four of the older API; found {n_values}: {result!r:.200}."
        )
    observation, reward, done, info = result
    truncated = bool(done and info.get(TRUNCATION_KEY, False))
    return observation, reward, bool(done) and not truncated, truncated, info


def gym_env_name(env: Any) -> str:
    """Return the id of a gymnasium environment, the name in its metadata, or the name of its class."""
    spec = getattr(env, "spec", None)
    if spec is not None:
        return str(spec.id)
    name = (getattr(env, "metadata", None) or {}).get("name")
    return str(name or type(getattr(env, "unwrapped", env)).__name__)


class Leaf:
    """Conversion of one entry: by default a cast between array types.

    :param space: The space of the gymnasium environment.
    :param place: Environment and key, for messages.
    """

    def __init__(self, space: spaces.Space[Any], place: str = "action") -> None:
        self.space = space
        if isinstance(space, spaces.Box) and space.dtype == np.float64:
            with np.errstate(over="ignore"):  # bounds beyond the range of float32 become infinite
                self.space = spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32), dtype=np.float32)
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
    """Conversion of a Discrete action `[]`: the agent counts from zero, gymnasium from `start`, as an integer."""

    def __init__(self, space: spaces.Discrete) -> None:
        # gymnasium 1.2 has no argument for the type, which is int64
        typed: dict[str, Any] = {} if space.dtype == np.int64 else {"dtype": space.dtype}
        super().__init__(spaces.Discrete(int(space.n), **typed))
        self.start = int(space.start)

    def to_gym(self, value: Any) -> int:
        if value.__class__ is np.ndarray:
            value = value.item()
        return operator.index(value) + self.start

    @override(Leaf)
    def from_gym(self, value: Any) -> np.ndarray:
        return np.asarray(value - self.start, dtype=self.dtype)

    @override(Leaf)
    def batch_to_gym(self, values: np.ndarray) -> np.ndarray:
        return values + self.start if self.start else values


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
        return np.asarray(np.minimum(np.maximum(action, self.low), self.high))


def action_leaves(space: spaces.Space[Any]) -> tuple[type | None, dict[str, Leaf]]:
    """Return conversions of an action space.

    :return: Container of the entries in gymnasium (`dict`, `tuple`, `None`: a single entry), and the entries.
    """
    kind, entries = _entries(space, "action")
    leaves: dict[str, Leaf] = {}
    for key, entry in entries.items():
        if isinstance(entry, spaces.Discrete):
            leaves[key] = DiscreteAction(entry)
        elif isinstance(entry, spaces.MultiDiscrete):
            leaves[key] = MultiDiscreteAction(entry)
        elif isinstance(entry, spaces.Box) and entry.dtype == np.float64:
            leaves[key] = DoubleBoxAction(entry)
        else:
            leaves[key] = Leaf(entry)
    return kind, leaves


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


def _entries(space: spaces.Space[Any], name: str) -> tuple[type | None, dict[str, spaces.Space[Any]]]:
    kind, entries = entries_of(space, name)
    if not all(isinstance(key, str) for key in entries):
        raise ConfigError(f"The {name} space has keys that are not strings: {list(entries)}. Rename them.")
    for key, entry in entries.items():
        if not isinstance(entry, LEAVES):
            raise ConfigError(
                f"The {name} space, entry `{key}`, is {entry!r}; expected Box, Discrete, MultiDiscrete or MultiBinary. "
                "Convert it with a gymnasium wrapper; environments of the older `gym` package with `shimmy`."
            )
    return kind, entries
