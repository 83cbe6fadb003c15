"""A replay buffer from which steps that surprised are drawn more often."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.train.trainers.common.replay_buffer.transitions import TransitionBatch
from maze.train.trainers.common.replay_buffer.uniform_replay_buffer import UniformReplayBuffer

_SMALLEST = 1e-6
"""Added to errors, so that every step is drawn now and then."""


class PrioritizedReplayBuffer(UniformReplayBuffer):
    """Draws steps in proportion to a power of their last error (Schaul et al. 2016, proportional variant).

    New steps get the highest priority there was. Batches are drawn in strata of equal priority, and carry importance
    weights `(n * probability) ** -beta`, scaled by the largest of the batch.

    :param buffer_size: Most steps that are kept.
    :param seed: Seed of the draws.
    :param alpha: Power of the errors; 0 draws all equally often.
    :param beta: Power of the importance weights at the start; 1 makes up for all of the bias. May be changed.
    """

    def __init__(self, buffer_size: int, seed: int, alpha: float = 0.6, beta: float = 0.4) -> None:
        super().__init__(buffer_size, seed)
        self.alpha = alpha
        self.beta = beta
        self._highest = 1.0
        self._n_known = 0
        self._sums = SumTree(buffer_size)

    @override(UniformReplayBuffer)
    def sample_transitions(self, n_samples: int, learner_device: str) -> TransitionBatch:
        batch = super().sample_transitions(n_samples, learner_device)
        probabilities = self._sums.values(batch.slots) / self._sums.total
        weights = (len(self) * probabilities) ** -self.beta
        batch.weights = torch.from_numpy((weights / weights.max()).astype(np.float32)).to(learner_device)
        return batch

    def set_errors(self, slots: np.ndarray, errors: np.ndarray) -> None:
        """Set how surprising rows were.

        :param slots: int64 `[B]`: where they lie, see
            :class:`~maze.train.trainers.common.replay_buffer.transitions.TransitionBatch`.
        :param errors: float `[B]`: absolute errors.
        """
        priorities = (np.abs(errors) + _SMALLEST) ** self.alpha
        self._highest = max(self._highest, float(priorities.max()))
        self._sums.set(slots, priorities)

    @override(UniformReplayBuffer)
    def _draw(self, n_samples: int) -> np.ndarray:
        if self.item_length != 1:
            raise ConfigError("A prioritised replay buffer holds single steps; its items cannot be whole rollouts.")
        self._take_notice_of_new_rows()
        if not len(self):
            return super()._draw(n_samples)  # raises the error for an empty buffer
        self.n_drawn += n_samples
        strata = (np.arange(n_samples) + self._rng.random(n_samples)) / n_samples
        slots: np.ndarray = np.minimum(self._sums.find(strata * self._sums.total), len(self) - 1)
        return slots

    def _take_notice_of_new_rows(self) -> None:
        n_new = min(self.n_rows_added - self._n_known, self.buffer_size)
        if n_new:
            slots = np.arange(self.n_rows_added - n_new, self.n_rows_added) % self.buffer_size
            self._sums.set(slots, np.full(n_new, self._highest))
            self._n_known = self.n_rows_added

    @override(UniformReplayBuffer)
    def state_dict(self, with_content: bool = True) -> dict[str, Any]:
        self._take_notice_of_new_rows()
        content = torch.from_numpy(self._sums.leaves.copy()) if with_content else None
        return {**super().state_dict(with_content), "priorities": content, "highest_priority": self._highest}

    @override(UniformReplayBuffer)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._highest = state["highest_priority"]
        if state["priorities"] is not None:
            self._sums.set(np.arange(self.buffer_size), state["priorities"].numpy())
            self._n_known = self.n_rows_added


class SumTree:
    """Numbers, drawn in proportion to their size in logarithmic time, many at once.

    :param size: How many; all are 0 to begin with.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._first_leaf = 1 << max(0, size - 1).bit_length()
        self._nodes = np.zeros(2 * self._first_leaf)

    @property
    def total(self) -> float:
        """Sum of all numbers."""
        return float(self._nodes[1])

    @property
    def leaves(self) -> np.ndarray:
        """The numbers themselves, `[size]`; a view."""
        return self._nodes[self._first_leaf : self._first_leaf + self._size]

    def values(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers at `indices`, `[B]`."""
        found: np.ndarray = self._nodes[self._first_leaf + indices]
        return found

    def set(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Set the numbers at `indices`, `[B]`; of one that is named twice the last value counts."""
        nodes = self._first_leaf + np.asarray(indices)
        self._nodes[nodes] = values
        while nodes.size and nodes[0] > 1:
            nodes = np.unique(nodes >> 1)
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """For each of `sums`, `[B]` in `[0, total)`, the number in which the running total passes it."""
        nodes = np.ones(len(sums), np.int64)
        rest = np.array(sums, np.float64)
        while nodes[0] < self._first_leaf:
            left = 2 * nodes
            in_left = self._nodes[left]
            goes_right = (rest >= in_left) & (self._nodes[left + 1] > 0.0)
            rest = np.where(goes_right, rest - in_left, rest)
            nodes = left + goes_right
        return nodes - self._first_leaf
