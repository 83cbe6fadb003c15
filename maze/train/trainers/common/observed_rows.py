"""What was observed in episodes that are played side by side, for running normalization."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.utils.stats_utils import CumulativeMovingMeanStd

if TYPE_CHECKING:
    from maze.core.env.structured_env import ActorID, StepKeyType
    from maze.perception.program.numpy_networks import Rows

Moments = dict[str, tuple[int, np.ndarray, np.ndarray]]
"""Number, mean and variance (float64 `[*shape]`) of an episode's observations by name."""


class ObservedRows:
    """Sums over the observations of episodes, each of which is a row.

    Of each observation the first one of its episode is subtracted, so that entries that do not vary have a variance of
    exactly 0. A row's sums are the same in any company.

    :param names: Which observations.
    :param observation_spaces_dict: Observation spaces by sub-step.
    :param n_rows: Number of episodes side by side.
    """

    def __init__(self, names: Collection[str], observation_spaces_dict: Mapping[StepKeyType, Any], n_rows: int) -> None:
        self._sums = {
            step_key: {name: _Sums(n_rows, tuple(space[name].shape)) for name in space if name in names}
            for step_key, space in (observation_spaces_dict if names else {}).items()
        }

    def __bool__(self) -> bool:
        return any(self._sums.values())

    def begin(self, row: int) -> None:
        """An episode begins."""
        for sums in self._all():
            for array in sums.arrays:
                array[row] = 0

    def add(self, actor: ActorID, observation: Mapping[str, np.ndarray], rows: Rows) -> None:
        """Takes observations into account that are acted on.

        :param actor: Who acts.
        :param observation: Arrays `[len(rows), *shape]`.
        :param rows: The episodes.
        """
        for name, sums in self._sums.get(actor[0], {}).items():
            sums.add(observation[name], rows)

    def move(self, source: int, target: int) -> None:
        """An episode is another row from now on."""
        for sums in self._all():
            for array in sums.arrays:
                array[target] = array[source]

    def of(self, row: int) -> Moments | None:
        """Statistics of an episode; `None` where nothing was to be noted."""
        parts = [
            {name: sums.moments(row) for name, sums in of_step.items() if sums.count[row]}
            for of_step in self._sums.values()
        ]
        return {
            name: (int(found.count), np.asarray(found.mean), np.asarray(found.var))
            for name, found in merged(parts).items()
        } or None

    def _all(self) -> list[_Sums]:
        return [sums for of_step in self._sums.values() for sums in of_step.values()]


def merged(observed: Iterable[Moments]) -> dict[str, CumulativeMovingMeanStd]:
    """Statistics of several episodes by name, merged in their order.

    :param observed: Those of each.
    """
    found: dict[str, CumulativeMovingMeanStd] = {}
    for moments in observed:
        for name, of_episode in moments.items():
            found.setdefault(name, CumulativeMovingMeanStd(epsilon=0.0)).merge(*of_episode)
    return found


class _Sums:
    """Of one observation: its number, the first one, and sums of differences from it and of their squares."""

    def __init__(self, n_rows: int, shape: tuple[int, ...]) -> None:
        self.count = np.zeros(n_rows, np.int64)
        self.first, self.sum, self.squares = (np.zeros((n_rows, *shape)) for _ in range(3))
        self.arrays = (self.count, self.first, self.sum, self.squares)

    def add(self, values: np.ndarray, rows: Rows) -> None:
        begins = self.count[rows] == 0
        if begins.any():
            which = np.arange(len(self.count))[rows][begins]
            self.first[which] = values[begins]
        difference = values - self.first[rows]
        self.sum[rows] += difference
        difference *= difference
        self.squares[rows] += difference
        self.count[rows] += 1

    def moments(self, row: int) -> tuple[int, np.ndarray, np.ndarray]:
        count = int(self.count[row])
        shift = self.sum[row] / count
        return count, self.first[row] + shift, np.maximum(self.squares[row] / count - shift * shift, 0.0)
