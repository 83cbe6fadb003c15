"""Values of gymnasium spaces: their arrays, checks and conversions."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError

SpacesDict = Mapping[StepKeyType, spaces.Dict]
Arrays = dict[StepKeyType, dict[str, np.ndarray]]
"""Step key -> observation or action key -> array."""

ndarray = np.ndarray

ArraySpec = tuple[tuple[int, ...], np.dtype[Any]]


def array_specs(spaces_dict: SpacesDict, kind: str) -> dict[StepKeyType, dict[str, ArraySpec]]:
    """Return shapes and dtypes for all step keys, in the spaces' own key order.

    :param spaces_dict: Spaces by step key.
    :param kind: `observation` or `action`, for error messages.
    """
    return {step_key: dict_specs(space, kind, f" of sub-step {step_key!r}") for step_key, space in spaces_dict.items()}


def dict_specs(space: spaces.Dict, kind: str = "entry", place: str = "") -> dict[str, ArraySpec]:
    """Return shapes and dtypes for all keys of a sub-step's spaces, in their order.

    :param space: The sub-step's spaces.
    :param kind: `observation` or `action`, for error messages.
    :param place: Environment and sub-step, for error messages.
    :raises EnvironmentContractError: Values have no fixed numeric shape.
    """
    specs = {}
    for key, sub in space.items():
        if sub.shape is None or sub.dtype is None or np.dtype(sub.dtype).kind not in "biuf":
            raise EnvironmentContractError(
                f"{kind} `{key}`{place}: {type(sub).__name__} spaces have no fixed numeric shape; expected Box, "
                "Discrete, MultiDiscrete or MultiBinary. Convert it in the conversion or with a wrapper."
            )
        specs[key] = tuple(sub.shape), np.dtype(sub.dtype)
    return specs


def usual_values(space: spaces.Dict) -> dict[str, np.ndarray]:
    """Return small values of a sub-step's spaces: ones where the space has ones, so that masks allow all actions.

    :param space: The sub-step's spaces.
    :return: Arrays `[*space.shape]` by key: the first choice of `Discrete` spaces, and the bound nearest to 1 where a
        box does not contain 1.
    :raises EnvironmentContractError: Values have no fixed numeric shape.
    """
    values = {}
    for key, (shape, dtype) in dict_specs(space).items():
        entry, ones = space[key], np.ones(shape, dtype)
        if isinstance(entry, spaces.Box):
            values[key] = np.clip(ones, entry.low, entry.high)
        else:  # Discrete and MultiDiscrete begin with `start`
            values[key] = ones * np.asarray(getattr(entry, "start", 1), dtype)
    return values


class Cast:
    """Convert the values of one space entry to its dtype.

    Floating-point dtypes accept any number, but no text. Integer and boolean dtypes accept a value of another dtype if
    it is represented exactly: NumPy itself would store 300 as 44 in `uint8`, and 0.7 as 0.

    >>> Cast(np.dtype(np.uint8), "observation `image`")(np.array([7.0]))
    array([7], dtype=uint8)

    :param dtype: The dtype of the space.
    :param place: Environment and key, for messages.
    """

    def __init__(self, dtype: np.dtype[Any], place: str) -> None:
        self.dtype = dtype
        self._place = place

    def __call__(self, value: Any) -> np.ndarray:
        """Return the value as an array of the dtype; an array of this dtype is not copied.

        :param value: A number or array.
        :raises EnvironmentContractError: The dtype does not represent it exactly.
        """
        # NumPy has one object for each native dtype: comparing identities takes a sixth of the time of `==`.
        if value.__class__ is ndarray and value.dtype is self.dtype:
            return value
        array = np.asarray(value)
        if array.dtype == self.dtype:
            return array
        is_same = np.zeros(array.shape, np.bool_)
        try:
            with np.errstate(invalid="ignore"):
                converted = array.astype(self.dtype)
            is_same = np.asarray((self.dtype.kind == "f" and array.dtype.kind not in "US") or converted == array)
            if is_same.all():
                return converted
        except (TypeError, ValueError, OverflowError):  # no numbers, or too large
            pass
        raise EnvironmentContractError(
            f"{self._place}: expected values of dtype {self.dtype}, found {array[~is_same].flat[0]!r} in an array of "
            f"dtype {array.dtype}. Correct them, or the space that declares the dtype."
        )


def zeros(spaces_dict: SpacesDict, leading: tuple[int, ...], kind: str) -> Arrays:
    """Return arrays `[*leading, ...]` for all values of the spaces.

    :param spaces_dict: Spaces by step key.
    :param leading: Leading dimensions.
    :param kind: `observation` or `action`, for error messages.
    """
    return {
        step_key: {key: np.zeros((*leading, *shape), dtype) for key, (shape, dtype) in specs.items()}
        for step_key, specs in array_specs(spaces_dict, kind).items()
    }


def copy_rows(source: Arrays, target: Mapping[StepKeyType, Mapping[str, np.ndarray]], actors: list[ActorID]) -> None:
    """Copy each environment's current observation between two sets of arrays `[n_envs, ...]`.

    :param source: Arrays by step key and observation key.
    :param target: The same structure.
    :param actors: Next actor by environment, which determines the arrays of its row.
    """
    step_keys = {actor.step_key for actor in actors}
    for step_key in step_keys:
        rows: Any = slice(None)
        if len(step_keys) > 1:
            rows = [index for index, actor in enumerate(actors) if actor.step_key == step_key]
        for key, array in source[step_key].items():
            target[step_key][key][rows] = array[rows]


def action_column(
    actions: Mapping[str, Any], step_key: StepKeyType, key: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> np.ndarray:
    """Return one key of the actions of a sub-step, as a copy.

    :param actions: Arrays `[n_envs, ...]` by action key.
    :param step_key: The sub-step, for error messages.
    :param key: The action key.
    :param shape: Its expected shape, environments included.
    :param dtype: Its type in the action space.
    :raises EnvironmentContractError: The key is missing, or its values do not have that shape and type.
    """
    try:
        column = np.array(actions[key], dtype)
    except (KeyError, TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"actions of sub-step {step_key!r}, action `{key}`: expected numbers ({dtype}), found {[*actions]}: {error}"
        ) from error
    if column.shape != shape:
        raise EnvironmentContractError(
            f"actions of sub-step {step_key!r}, action `{key}`: expected the shape {shape}, found {column.shape}."
        )
    return column


def check_observation(
    observation: Any, actor: ActorID, specs: Mapping[StepKeyType, Mapping[str, ArraySpec]], env_index: int
) -> None:
    """Check an observation against its space.

    :param observation: The observation.
    :param actor: Its actor.
    :param specs: Shapes and dtypes by step key and observation key.
    :param env_index: Index of the environment.
    :raises EnvironmentContractError: It does not fit; the message names environment, sub-step and key.
    """
    place = f"environment {env_index}, sub-step {actor.step_key!r}"
    expected = specs.get(actor.step_key)
    if expected is None:
        raise EnvironmentContractError(
            f"{place}: actor_id() returned a sub-step without an observation space. Known: {list(specs)}."
        )
    check_entries(observation, expected, place)


def check_entries(
    observation: Any, expected: Mapping[str, tuple[tuple[int, ...] | None, np.dtype[Any] | None]], place: str
) -> None:
    """Check the keys, shapes and dtypes of an observation.

    :param observation: The observation.
    :param expected: Shapes and dtypes by key; `None`: not of arrays.
    :param place: Environment and sub-step, for the message.
    :raises EnvironmentContractError: It does not fit.
    """
    if not isinstance(observation, Mapping) or set(observation) != set(expected):
        found = list(observation) if isinstance(observation, Mapping) else type(observation).__name__
        raise EnvironmentContractError(
            f"{place}: expected an observation with the keys {list(expected)}, found {found}."
        )
    for key, (shape, dtype) in expected.items():
        if shape is None or dtype is None:
            continue
        value = np.asarray(observation[key])
        if value.shape != shape or not np.can_cast(value.dtype, dtype, "same_kind"):
            raise EnvironmentContractError(
                f"{place}, observation `{key}`: expected shape {shape} and dtype {dtype} as in its space, found "
                f"shape {value.shape} and dtype {value.dtype}."
            )


def split_rows(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """Return a dictionary for each row.

    :param columns: Arrays `[n_rows, ...]` by key, at least one.
    :return: `n_rows` dictionaries of views of the arrays; numbers of arrays `[n_rows]` are copies.
    """
    if len(columns) == 1:
        ((key, column),) = columns.items()
        return [{key: row} for row in column]
    return [dict(zip(columns, rows, strict=True)) for rows in zip(*columns.values(), strict=True)]


def check_in_space(observation: Any, space: spaces.Space[Any], env_name: str, step_key: StepKeyType) -> None:
    """Check an observation against its space; issue a `UserWarning` if only its values are out of range.

    :param observation: Result of a conversion.
    :param space: Its space; spaces other than dictionaries are not checked.
    :param env_name: Environment, for messages.
    :param step_key: Sub-step, for messages.
    :raises EnvironmentContractError: Keys, shapes or dtypes differ.
    """
    if not isinstance(space, spaces.Dict):
        return
    place = f"{env_name}, sub-step {step_key!r}"
    check_entries(observation, {key: (entry.shape, entry.dtype) for key, entry in space.items()}, place)
    for key, entry in space.items():
        array = np.asarray(observation[key])
        if entry.shape is not None and entry.dtype is not None and not entry.contains(array.astype(entry.dtype)):
            warnings.warn(  # without the values, so that it is shown once for all environments of a process
                f"{place}, observation `{key}`: some values are not in the space {entry}; check_env shows them.",
                UserWarning,
                stacklevel=5,
            )


def rows_outside(values: np.ndarray, space: spaces.Space[Any]) -> np.ndarray:
    """Return which rows are no values of a space, apart from the bounds of boxes: not finite, or no choice, `[n]`.

    :param values: `[n, *space.shape]`.
    :param space: Their space.
    """
    outside = ~np.isfinite(values) if values.dtype.kind == "f" else np.zeros(values.shape, np.bool_)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        choices = values - getattr(space, "start", 0)
        outside |= (choices < 0) | (choices >= getattr(space, "n" if isinstance(space, spaces.Discrete) else "nvec", 2))
    return np.asarray(outside.reshape(len(values), -1).any(1))


# -- entries of observation and action spaces in gymnasium, and their conversions -------------------------------------

LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
"""Spaces of single entries."""


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

    :param space: A space of single entries (:data:`LEAVES`), or a `Dict` or `Tuple` of these.
    :return: Container of the entries in gymnasium (`dict`, `tuple`, `None`: a single entry), and the entries.
    :raises ConfigError: A key is not a string, or an entry is of another space.
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
    :raises ConfigError: See :func:`action_leaves`.
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
