"""Table of random numbers shared by all processes: a perturbation is identified by its position in the table."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from maze.core.errors import ConfigError
from maze.core.utils.config_utils import whole_number
from maze.core.utils.worker_process import map_memory

# Number of values drawn at once, large enough to amortise the set-up of the generator.
_CHUNK = 8192


class SharedNoiseTable:
    """Standard normal numbers that are determined by `seed` and their position.

    Numbers are drawn in chunks on first access and occupy memory from then on. Each process draws the chunks that it
    needs, into shared memory if there is any. All processes write the same numbers, so no synchronisation is needed.

    :param count: Size of the table.
    :param seed: Seed of the table.
    :param fd: Memory of another process; `None`: create new memory.
    :raises ConfigError: The size is below 1.
    """

    def __init__(self, count: int = 250000000, *, seed: int = 0, fd: int | None = None) -> None:
        self.count = whole_number("runner.shared_noise_table_size", count, at_least=1)
        self.seed = seed
        n_chunks = -(-count // _CHUNK)
        self.memory = map_memory(4 * _CHUNK * n_chunks, fd)
        """Anonymous file, to which its descriptor gives another process access."""
        self._numbers: np.ndarray = np.ndarray(_CHUNK * n_chunks, np.float32, buffer=self.memory.map)
        self._is_drawn = np.zeros(n_chunks, np.bool_)
        self._philox = np.random.Philox(key=seed)
        self._generator = np.random.Generator(self._philox)
        self._start = self._philox.state

    def get(self, i: int, dim: int) -> np.ndarray:
        """Return numbers from a position on; the table is circular.

        :param i: Position.
        :param dim: Number of values.
        :return: float32 `[dim]`, read-only.
        :raises ConfigError: The table is shorter than one perturbation.
        :raises IndexError: The position is outside of the table.
        """
        if dim > self.count:
            raise ConfigError(
                f"runner.shared_noise_table_size: a perturbation of {dim} parameters does not fit into a table of "
                f"{self.count} numbers. Make the table several times larger than the model."
            )
        if not 0 <= i < self.count:
            raise IndexError(f"Position {i} is outside of the noise table, which has {self.count} numbers.")
        if i + dim > self.count:
            n_first = self.count - i
            wrapped = np.concatenate([self.get(i, n_first), self.get(0, dim - n_first)])
            wrapped.flags.writeable = False
            return wrapped
        for chunk in range(i // _CHUNK, (i + dim - 1) // _CHUNK + 1):
            if not self._is_drawn[chunk]:
                self._draw(chunk)
        numbers = self._numbers[i : i + dim]
        numbers.flags.writeable = False
        return numbers

    def sample_index(self, rng: np.random.RandomState) -> int:
        """Sample a position.

        :param rng: Random generator.
        """
        return int(rng.randint(0, self.count))

    def _draw(self, chunk: int) -> None:
        state: Any = dict(self._start)  # with an empty buffer
        state["state"] = {**self._start["state"], "counter": np.array([0, chunk, 0, 0], np.uint64)}
        self._philox.state = state
        place = self._numbers[chunk * _CHUNK : (chunk + 1) * _CHUNK]
        self._generator.standard_normal(dtype=np.float32, out=place)
        self._is_drawn[chunk] = True

    def __reduce__(self) -> tuple[Any, ...]:
        """Return size and seed: a copy draws the same numbers into its own memory."""
        return partial(type(self), seed=self.seed), (self.count,)
