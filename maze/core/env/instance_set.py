"""Instance sets: given problem instances, each played once and in order."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from maze.core.errors import ConfigError

_LARGEST_SEED = 2**31 - 1

InstanceSource: TypeAlias = "InstanceSet | Mapping[str, np.ndarray] | str | Path"
"""A set, its arrays `[n_instances, ...]` by name, or an `.npz` file of such arrays."""


class InstanceSet:
    """Problem instances in arrays.

    :param arrays: Arrays `[n_instances, ...]` by name.
    :param origin: Where they come from, for messages.
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
        self._length = next(iter(lengths.values()))

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
        """Raise a `ConfigError` unless there are arrays of these names.

        :param names: The names.
        :param env_name: The environment that needs them, for messages.
        """
        if missing := [name for name in names if name not in self.arrays]:
            raise ConfigError(
                f"{self.origin}: {env_name} needs the arrays {', '.join(names)}; there is no {', '.join(missing)}, "
                f"found {', '.join(self.arrays)}."
            )

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the arrays of some instances, `[n_indices, ...]`."""
        return {name: array[indices] for name, array in self.arrays.items()}

    def __len__(self) -> int:
        return self._length


def ordered_seeds(
    seeds: Sequence[tuple[int, int]], n_instances: int, key: str = "runner.n_episodes"
) -> list[tuple[int, int]]:
    """Return seeds with which episode `i` plays instance `i` of a set.

    An environment plays instance `seed mod n_instances` after it is seeded.

    :param seeds: Seeds of environment and agent of each episode.
    :param n_instances: Number of instances; 0: the environment has no set, and the seeds stay.
    :param key: The number of episodes in the configuration, for messages.
    :raises ConfigError: Some instances would be played more often than others.
    """
    if not n_instances:
        return list(seeds)
    check_episode_count(len(seeds), n_instances, key)
    ordered = []
    for number, (env_seed, agent_seed) in enumerate(seeds):
        near = min(env_seed, _LARGEST_SEED - n_instances)
        ordered.append((near - near % n_instances + number % n_instances, agent_seed))
    return ordered


def check_episode_count(n_episodes: int, n_instances: int, key: str) -> None:
    """Raise a `ConfigError` if some instances would be played more often than others."""
    if n_episodes > n_instances and n_episodes % n_instances:
        raise ConfigError(
            f"{key}={n_episodes}: env.instances has {n_instances} instances, each of which is played once. Use at most "
            f"{n_instances}, or a multiple of it to play each several times."
        )
