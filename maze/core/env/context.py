"""Contexts: parameters drawn for each episode. Instance sets: given problem instances, each played once, in order."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from maze.core.errors import ConfigError

CONTEXT = "context"
"""Key of the observation of the context, and prefix of its KPIs."""

GRID = "grid"
"""Value of `env.instances`: all combinations of the context's values."""

_GRID_POINTS = 3


class Parameter(NamedTuple):
    """A parameter of a problem.

    :param name: Its name.
    :param values: The values to choose from, numbers or texts; empty: an interval.
    :param lower: Smallest number.
    :param upper: Largest number.
    :param is_integer: Whether an interval has whole numbers only.
    """

    name: str
    values: tuple[Any, ...]
    lower: float
    upper: float
    is_integer: bool = False

    @classmethod
    def of(cls, name: str, given: Any) -> Parameter:
        """Read the configuration of a parameter: a list of values, or a mapping with `lower` and `upper`.

        :param name: Name of the parameter.
        :param given: Its configuration.
        :raises ConfigError: It is neither.
        """
        wrong = ConfigError(
            f"env.context.{name}: expected a list of different numbers, or of different texts, or a mapping with "
            f"`lower` < `upper` and optionally `integer` (both whole numbers then), found {given}."
        )
        if isinstance(given, Mapping):
            bounds: list[Any] = [given.get("lower"), given.get("upper")]
            is_integer = bool(given.get("integer", False))
            if not set(given) <= {"lower", "upper", "integer"} or not all(map(_is_number, bounds)):
                raise wrong
            lower, upper = (float(bound) for bound in bounds)
            if lower >= upper or (is_integer and not (lower.is_integer() and upper.is_integer())):
                raise wrong
            return cls(name, (), lower, upper, is_integer)
        if not isinstance(given, Sequence) or isinstance(given, str) or not given:
            raise wrong
        values = tuple(given)
        is_text = [isinstance(value, str) for value in values]
        if not (all(is_text) or all(map(_is_number, values))) or len(set(values)) < len(values):
            raise wrong
        numbers = range(len(values)) if all(is_text) else values
        return cls(name, values, float(min(numbers)), float(max(numbers)))

    @property
    def is_text(self) -> bool:
        """Whether the values are texts; they are stored as their index."""
        return bool(self.values) and isinstance(self.values[0], str)

    @property
    def is_whole(self) -> bool:
        """Whether all values are whole numbers."""
        if self.is_text or not self.values:
            return self.is_integer
        return all(float(value).is_integer() for value in self.values)

    @property
    def given(self) -> object:
        """The values as they were configured, for messages."""
        return list(self.values) or {"lower": self.lower, "upper": self.upper}

    @property
    def size(self) -> int:
        """Number of observed numbers."""
        return len(self.values) if self.is_text else 1

    def drawn(self, uniform: np.ndarray) -> np.ndarray:
        """Return stored values for random numbers; all values of a list, or whole numbers, are equally probable.

        :param uniform: Random numbers in [0, 1), `[n]`.
        :return: float64 `[n]`.
        """
        if self.values:
            return np.asarray(self.grid()[(uniform * len(self.values)).astype(np.int64)])
        if self.is_integer:
            return self.lower + np.floor(uniform * (self.upper - self.lower + 1))
        return self.lower + uniform * (self.upper - self.lower)

    def observed(self, stored: np.ndarray) -> np.ndarray:
        """Return observations of stored values: numbers scaled to their range, texts as one of n.

        :param stored: Stored values, `[n]`; those outside the range are not clipped.
        :return: float32 `[n, size]`, in [0, 1] for values in the range.
        """
        if self.is_text:
            return np.asarray(stored[:, None] == np.arange(len(self.values)), np.float32)
        width = (self.upper - self.lower) or 1.0
        return np.asarray((stored[:, None] - self.lower) / width, np.float32)

    def stored(self, observed: np.ndarray) -> np.ndarray:
        """Return the stored values of observations; the inverse of :meth:`observed`.

        :param observed: Observations, `[n, size]`. Those between the values of a list, or between whole numbers, stand
            for the nearest one.
        :return: float64 `[n]`.
        """
        if self.is_text:
            return np.asarray(observed.argmax(axis=1), np.float64)
        numbers = self.lower + observed[:, 0].astype(np.float64) * (self.upper - self.lower)
        if self.values:
            values = np.asarray(self.values, np.float64)
            return np.asarray(values[np.abs(numbers[:, None] - values).argmin(axis=1)])
        return np.rint(numbers) if self.is_integer else numbers

    def grid(self) -> np.ndarray:
        """Return the stored values that an evaluation visits: all of a list, ends and middle of an interval."""
        if self.values:
            return np.asarray(range(len(self.values)) if self.is_text else self.values, np.float64)
        points = np.linspace(self.lower, self.upper, _GRID_POINTS)
        return np.unique(np.rint(points)) if self.is_integer else points


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and bool(np.isfinite(value))


class Context:
    """Parameters of a problem. Stored values are numbers `[n, n_parameters]`; a text is stored as its index.

    :param parameters: By name a list of values (numbers or texts), or a mapping with `lower`, `upper` and, for whole
        numbers, `integer: true`.
    :param known: Names that the problem has.
    :raises ConfigError: A parameter is unknown or cannot be read.
    """

    def __init__(self, parameters: Mapping[str, Any], known: Sequence[str]) -> None:
        if unknown := [name for name in parameters if name not in known]:
            raise ConfigError(
                f"env.context: expected some of the parameters {', '.join(known)}, found {', '.join(unknown)}."
            )
        self.parameters = [Parameter.of(str(name), given) for name, given in parameters.items()]
        self.names = [parameter.name for parameter in self.parameters]
        self.size = sum(parameter.size for parameter in self.parameters)
        """Number of observed numbers."""

    def __getitem__(self, name: str) -> Parameter:
        """Return a parameter by its name."""
        return self.parameters[self.names.index(name)]

    def drawn(self, uniform: np.ndarray) -> np.ndarray:
        """Return stored values for random numbers in [0, 1), both `[n, n_parameters]`."""
        return np.stack([each.drawn(uniform[:, index]) for index, each in enumerate(self.parameters)], axis=1)

    def observed(self, stored: np.ndarray) -> np.ndarray:
        """Return observations in [0, 1], `[n, size]`, of stored values."""
        columns = [each.observed(stored[:, index]) for index, each in enumerate(self.parameters)]
        return np.concatenate(columns, axis=1)

    def stored(self, observed: np.ndarray) -> np.ndarray:
        """Return stored values `[n, n_parameters]` of observations `[n, size]`, for heuristics."""
        ends = np.cumsum([each.size for each in self.parameters])[:-1]
        parts = zip(self.parameters, np.split(observed, ends, axis=1), strict=True)
        return np.stack([each.stored(part) for each, part in parts], axis=1)

    def instances(self) -> dict[str, np.ndarray]:
        """Return all combinations of the values of the grid as an instance set."""
        combinations = np.array(list(product(*(each.grid() for each in self.parameters))))
        return {f"{CONTEXT}/{name}": combinations[:, index] for index, name in enumerate(self.names)}


# -- instance sets ---------------------------------------------------------------------------------------------------

_LARGEST_SEED = 2**31 - 1

InstanceSource: TypeAlias = "InstanceSet | Mapping[str, np.ndarray] | str | Path"
"""A set, its arrays `[n_instances, ...]` by name, or an `.npz` file of such arrays."""


class InstanceSet:
    """Problem instances in arrays.

    :param arrays: Arrays `[n_instances, ...]` by name.
    :param origin: Their source, for messages.
    :raises ConfigError: There is no instance, or the arrays have different numbers of them.
    """

    def __init__(self, arrays: Mapping[str, Any], origin: str = "env.instances") -> None:
        self.arrays = {name: np.asarray(array) for name, array in arrays.items()}
        self.origin = origin
        lengths = {name: len(array) if array.ndim else 0 for name, array in self.arrays.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ConfigError(
                f"{origin}: expected arrays [n_instances, ...] of the same number of instances, at least one, found "
                f"{', '.join(f'`{name}` {self.arrays[name].shape}' for name in lengths) or 'no arrays'}."
            )

    @classmethod
    def of(cls, source: InstanceSource) -> InstanceSet:
        """Return a set of instances; files are read without executing code.

        :param source: A set, arrays, or a file.
        :raises ConfigError: The file cannot be read.
        """
        if isinstance(source, InstanceSet):
            return source
        if isinstance(source, Mapping):
            return cls(source)
        origin = f"env.instances={source}"
        try:
            with np.load(source, allow_pickle=False) as file:
                return cls(dict(file), origin)
        except (OSError, ValueError, TypeError, AttributeError, EOFError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{origin}: expected an .npz file of arrays [n_instances, ...], as numpy.savez writes it: {error}"
            ) from error

    def require(self, names: Sequence[str], env_name: str) -> None:
        """Check that there are arrays of these names; further arrays are allowed.

        :param names: The names.
        :param env_name: The environment that needs them, for messages.
        :raises ConfigError: An array is missing.
        """
        if not {*names} <= {*self.arrays}:
            raise ConfigError(
                f"{self.origin}: {env_name} needs the arrays {', '.join(names)}; found {', '.join(self.arrays)}."
            )

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return some instances.

        :param indices: Their indices, `[n_indices]`.
        :return: Arrays `[n_indices, ...]` by name, copies for an array of indices.
        """
        return {name: array[indices] for name, array in self.arrays.items()}

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))


def ordered_seeds(seeds: Sequence[tuple[int, int]], n_instances: int) -> list[tuple[int, int]]:
    """Return seeds with which episode `i` plays instance `i` of a set.

    An environment plays instance `seed mod n_instances` after it is seeded.

    :param seeds: Seeds of environment and agent of each episode.
    :param n_instances: Number of instances; 0: the environment has no set, and the seeds stay.
    :raises ConfigError: Some instances would be played more often than others.
    """
    if not n_instances:
        return list(seeds)
    check_episode_count(len(seeds), n_instances, "runner.n_episodes")
    ordered = []
    for number, (env_seed, agent_seed) in enumerate(seeds):
        near = min(env_seed, _LARGEST_SEED - n_instances)
        ordered.append((near - near % n_instances + number % n_instances, agent_seed))
    return ordered


def check_episode_count(n_episodes: int, n_instances: int, key: str) -> None:
    """Check that no instance is played more often than others, unless some are not played at all.

    :param n_episodes: Number of episodes.
    :param n_instances: Number of instances.
    :param key: Configuration key of `n_episodes`, for the message.
    :raises ConfigError: There are more episodes than instances, and no multiple of their number.
    """
    if n_episodes > n_instances and n_episodes % n_instances:
        raise ConfigError(
            f"{key}={n_episodes}: env.instances has {n_instances} instances; play at most as many, or a multiple."
        )
