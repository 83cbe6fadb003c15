"""Recall: symbols are shown one after the other, and have to be named in the same order when they are gone.

What is observed when an answer is wanted says nothing about the answer. Without hidden states a policy earns at most
`1 / n_symbols` on average; with one it can earn 1.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.utils.config_utils import whole_number


class Recall(BatchedCoreEnv):
    """Sequences of symbols to be remembered.

    Observed is `signs` `[n_symbols + 1]`: 1 at the symbol that is shown, and at the last place where an answer is
    wanted. The action `symbol` counts then only; each right answer earns `1 / n_items`. An episode has
    `2 * n_items + delay` steps.

    :param n_envs: Number of sequences.
    :param n_items: Symbols of a sequence.
    :param n_symbols: Different symbols that there are.
    :param delay: Steps between the last symbol and the first answer, in which nothing is shown.
    """

    row_arrays: ClassVar[tuple[str, ...]] = ("items", "elapsed")

    def __init__(self, n_envs: int, n_items: int = 3, n_symbols: int = 4, delay: int = 2) -> None:
        self.n_items = whole_number("n_items", n_items, at_least=1)
        self.n_symbols = whole_number("n_symbols", n_symbols, at_least=2)
        self.delay = whole_number("delay", delay, at_least=0)
        signs = spaces.Dict(signs=spaces.Box(0.0, 1.0, (n_symbols + 1,), np.float32))
        super().__init__(n_envs, {0: spaces.Dict(symbol=spaces.Discrete(n_symbols))}, {0: signs})
        self.items = np.zeros((n_envs, n_items), np.int64)
        self._rows = np.arange(n_envs)

    @override(BatchedCoreEnv)
    def reset_rows(self, rows: np.ndarray) -> None:
        drawn = self.random.uniform(rows, self.n_items).reshape(len(rows), self.n_items)
        self.items[rows] = (drawn * self.n_symbols).astype(np.int64)

    @override(BatchedCoreEnv)
    def new_futures(self, rows: np.ndarray | slice, scenarios: np.ndarray | int, seed: int) -> None:
        """Draw the symbols again that have not been shown."""
        super().new_futures(rows, scenarios, seed)
        rows = self._rows[rows]
        drawn = self.random.uniform(rows, self.n_items).reshape(len(rows), self.n_items) * self.n_symbols
        is_shown = np.arange(self.n_items) <= self.elapsed[rows, None]
        self.items[rows] = np.where(is_shown, self.items[rows], drawn.astype(np.int64))

    @override(BatchedCoreEnv)
    def step(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        recalled = self.elapsed - self.n_items - self.delay
        right = (recalled >= 0) & (actions["symbol"] == self.items[self._rows, np.maximum(recalled, 0)])
        return right / self.n_items, recalled == self.n_items - 1

    @override(BatchedCoreEnv)
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        signs = out["signs"]
        signs[:] = 0.0
        shown = np.flatnonzero(self.elapsed < self.n_items)
        signs[shown, self.items[shown, self.elapsed[shown]]] = 1.0
        signs[:, -1] = self.elapsed >= self.n_items + self.delay


class RecallEnv(BatchedMazeEnv):
    """One sequence of symbols; see :class:`Recall` for the arguments."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(functools.partial(Recall, **arguments))
