"""The memory that a vector environment and its worker processes share.

An unlinked file in memory: it has no name that could be left behind, whoever dies in whatever order.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from maze.core.env.space_arrays import Arrays, ArraySpec, SpacesDict, array_specs
from maze.core.env.structured_env import ActorID, StepKeyType

_ALIGNMENT = 64  # a cache line: workers write side by side


class SharedArrays:
    """Arrays `[n_envs, ...]` for everything that one step exchanges.

    :param n_envs: Number of environments.
    :param observation_spaces_dict: Observation spaces by sub-step key.
    :param action_spaces_dict: Action spaces by sub-step key.
    :param fd: Memory of another process; by default new memory is created.
    """

    def __init__(
        self, n_envs: int, observation_spaces_dict: SpacesDict, action_spaces_dict: SpacesDict, fd: int | None = None
    ) -> None:
        self.n_envs = n_envs
        self.step_keys: list[StepKeyType] = list(observation_spaces_dict)
        observation_specs = array_specs(observation_spaces_dict, "observation")
        action_specs = array_specs(action_spaces_dict, "action")
        specs = [
            spec for part in (observation_specs, action_specs) for by_key in part.values() for spec in by_key.values()
        ]
        size = sum(self._size(spec) for spec in specs) + self._size(_ACTOR) + 4 * self._size(_FLOAT)
        self.memory = map_memory(size, fd)
        """Its descriptor gives another process access."""
        self._offset = 0
        self.observations = self._allocate_all(observation_specs)
        self.actions = self._allocate_all(action_specs)
        self.rewards = self._allocate(_FLOAT)
        self.terminated = self._allocate(_FLAG)
        self.truncated = self._allocate(_FLAG)
        self.step_complete = self._allocate(_FLAG)
        self._actors = self._allocate(_ACTOR)

    def write_actors(self, rows: slice, actors: list[ActorID]) -> None:
        """Publishes who acts next.

        :param rows: The environments.
        :param actors: One actor for each of them.
        """
        self._actors[rows] = [(self.step_keys.index(actor.step_key), actor.agent_id) for actor in actors]

    def read_actors(self) -> list[ActorID]:
        """Who acts next, by environment."""
        return [ActorID(self.step_keys[key_index], agent_id) for key_index, agent_id in self._actors.tolist()]

    def _size(self, spec: ArraySpec) -> int:
        shape, dtype = spec
        size = self.n_envs * int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def _allocate(self, spec: ArraySpec) -> np.ndarray:
        shape, dtype = spec
        array: np.ndarray = np.ndarray((self.n_envs, *shape), dtype, buffer=self.memory.map, offset=self._offset)
        self._offset += self._size(spec)
        return array

    def _allocate_all(self, specs: dict[StepKeyType, dict[str, ArraySpec]]) -> Arrays:
        return {
            step_key: {key: self._allocate(spec) for key, spec in by_key.items()} for step_key, by_key in specs.items()
        }


_FLOAT: ArraySpec = ((), np.dtype(np.float32))
_FLAG: ArraySpec = ((), np.dtype(np.bool_))
_ACTOR: ArraySpec = ((2,), np.dtype(np.int64))


class SharedMemory:
    """A mapped file without a name; the mapping goes when the last array on it does."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.map = mmap.mmap(fd, size)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter ends
        close(self.fd)


def map_memory(size: int, fd: int | None = None) -> SharedMemory:
    """Memory that other processes can map as well: zeros at first, and no page of it exists before it is touched.

    :param size: Number of bytes.
    :param fd: Memory of another process; by default new memory is created.
    """
    size = max(size, mmap.PAGESIZE)
    if fd is None:
        fd = _anonymous_file()
        os.ftruncate(fd, size)
    return SharedMemory(fd, size)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("maze-vector-env")
    fd, path = tempfile.mkstemp(prefix="maze-")
    os.unlink(path)
    return fd


def rows_of(arrays: Arrays, rows: slice) -> Arrays:
    """Views on some environments' rows of all arrays.

    :param arrays: Arrays `[n_envs, ...]`.
    :param rows: The environments.
    """
    return {step_key: {key: array[rows] for key, array in by_key.items()} for step_key, by_key in arrays.items()}


def env_slices(n_envs: int, n_workers: int) -> Iterator[slice]:
    """Consecutive environments for each worker, as evenly as possible.

    :param n_envs: Number of environments.
    :param n_workers: Number of workers, at most `n_envs`.
    """
    bounds = [index * n_envs // n_workers for index in range(n_workers + 1)]
    for start, stop in pairwise(bounds):
        yield slice(start, stop)
