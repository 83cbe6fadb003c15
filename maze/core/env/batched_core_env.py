"""Vectorised simulations: many instances of one problem, stepped in arrays.

One implementation has two uses: :class:`~maze.core.env.batched_maze_env.BatchedMazeEnv` makes a single environment of
it; `runner.placement=batched` steps all environments of a training run at once, many times as fast
(`benchmarks/batched_env.py`). Both give the same episodes from the same seeds.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError

_BLOCK = 512
"""Number of random numbers that are generated at once."""

_ONE = np.array(1)
"""An array, because a number would be converted at each use."""


class RowStreams:
    """Uniform random numbers for vectorised simulations.

    Each row has a random generator of its own, which depends on its seed and on the number of values taken only, not on
    the other rows. Its position is two numbers.
    """

    def __init__(self, n_rows: int) -> None:
        self._seeds = [int.from_bytes(os.urandom(8), "little") for _ in range(n_rows)]
        self._blocks = np.full(n_rows, -1)
        self._positions = np.full(n_rows, _BLOCK)
        self._numbers = np.zeros((n_rows, _BLOCK))
        self._all = np.arange(n_rows)

    def seed(self, row: int, seed: int) -> None:
        """Seed the generator of a row.

        :param row: The row.
        :param seed: Any integer.
        """
        self._seeds[row] = int(seed)
        self._blocks[row] = -1
        self._positions[row] = _BLOCK

    def uniform(self, rows: np.ndarray | None = None, count: int = 1) -> np.ndarray:
        """Return the next numbers of some rows, in [0, 1).

        :param rows: Indices of the rows; `None`: all.
        :param count: Number of values per row, at most 512.
        :return: `[n_rows]` for a single number, else `[n_rows, count]`.
        """
        rows = self._all if rows is None else rows
        positions = self._positions[rows]
        spent = rows[positions + count > _BLOCK]
        if len(spent):
            self._refill(spent)
            positions = self._positions[rows]
        self._positions[rows] = positions + count
        numbers: np.ndarray
        if count == 1:
            numbers = self._numbers[rows, positions]
        else:
            numbers = self._numbers[rows[:, None], positions[:, None] + np.arange(count)]
        return numbers

    def state(self, row: int) -> dict[str, int]:
        """Return the position of the generator of a row."""
        return {"seed": self._seeds[row], "block": int(self._blocks[row]), "position": int(self._positions[row])}

    def load_state(self, row: int, state: Mapping[str, int]) -> None:
        """Restore a position of :meth:`state`."""
        self._seeds[row] = state["seed"]
        self._blocks[row] = state["block"] - 1
        self._refill([row])
        self._positions[row] = state["position"]

    def _refill(self, rows: Sequence[int] | np.ndarray) -> None:
        for row in rows:
            block = int(self._blocks[row]) + 1
            self._blocks[row] = block
            if block >= 0:
                self._numbers[row] = np.random.default_rng((self._seeds[row] % 2**64, block)).random(_BLOCK)
            self._positions[row] = 0 if block >= 0 else _BLOCK


class FiredEvent(NamedTuple):
    """An event that occurred in some of the simulations.

    :param event: The event's interface method.
    :param where: bool `[n_envs]`: the simulations in which it occurred; `None`: all.
    :param attributes: Values by name, `[n_envs]`, or one for all.
    """

    event: Callable[..., Any]
    where: np.ndarray | None
    attributes: Mapping[str, Any]


class BatchedCoreEnv(ABC):
    """Simulations of one problem, stepped together: arrays `[n_envs, ...]` instead of numbers.

    Subclasses define the arrays of the state (named in `row_arrays`), :meth:`reset_rows`, :meth:`step` and
    :meth:`observe`, take random numbers from `self.random` only, fire events with :meth:`fire` and return KPIs from
    :meth:`kpis`.

    All simulations are at the same sub-step, and episodes end with complete steps.

    :param n_envs: Number of simulations.
    :param action_spaces: Action spaces by sub-step key, in the order in which the sub-steps of a step are taken.
    :param observation_spaces: Observation spaces by sub-step key.
    :param max_episode_steps: Number of steps after which episodes are truncated; `None`: no limit.
    """

    row_arrays: ClassVar[tuple[str, ...]] = ()
    """Names of the attributes `[n_envs, ...]` of the state: :meth:`observe` reads no other variable attributes.
    `elapsed` is one of them if it is observed."""

    seeds_rows: ClassVar[bool] = True
    """Whether each simulation has a random generator of its own."""

    event_interfaces: ClassVar[tuple[type[Any], ...]] = ()
    """Interfaces of the events that :meth:`fire` is called with."""

    def __init__(
        self,
        n_envs: int,
        action_spaces: Mapping[StepKeyType, spaces.Dict],
        observation_spaces: Mapping[StepKeyType, spaces.Dict],
        max_episode_steps: int | None = None,
    ) -> None:
        if list(action_spaces) != list(observation_spaces):
            raise ConfigError(
                f"{type(self).__name__}: expected spaces of the same sub-steps, found actions for "
                f"{list(action_spaces)} and observations for {list(observation_spaces)}."
            )
        self.n_envs = n_envs
        self.action_spaces = dict(action_spaces)
        self.observation_spaces = dict(observation_spaces)
        self.max_episode_steps = max_episode_steps
        self.step_keys = list(action_spaces)
        self.substep = 0
        """Position in `step_keys` of the sub-step that is taken next."""
        self.elapsed = np.zeros(n_envs, np.int64)
        """Steps of the running episodes."""
        self.random = RowStreams(n_envs)
        self.fired: list[FiredEvent] = []
        """The events of the last sub-step."""
        self.nobody = np.zeros(n_envs, np.bool_)
        """bool `[n_envs]`, all false; compared by identity to skip further checks."""
        self.nobody.flags.writeable = False
        self.pausing: np.ndarray | None = None
        """Indices of simulations with a pending autoreset: the next step begins their episode and ignores their action;
        `None`: there are none. See :class:`~maze.core.wrappers.gym_vector_env.GymBatch`."""

    @abstractmethod
    def reset_rows(self, rows: np.ndarray) -> None:
        """Begin new episodes.

        :param rows: Indices of the simulations, `[n_rows]`.
        """

    @abstractmethod
    def step(
        self, actions: Mapping[str, np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take the sub-step `step_keys[substep]` in all simulations.

        :param actions: Arrays `[n_envs, ...]` by action key.
        :return: Rewards, float `[n_envs]`, and whether episodes have terminated, bool `[n_envs]`; optionally also
            whether they were truncated for other reasons than `max_episode_steps`, bool `[n_envs]`.
        """

    @abstractmethod
    def observe(self, out: Mapping[str, np.ndarray]) -> None:
        """Write the observations of the sub-step `step_keys[substep]`.

        :param out: Arrays `[n_envs, ...]` by observation key.
        """

    def kpis(self, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return key performance indicators of ended episodes. Default: none.

        :param rows: Indices of the simulations.
        :return: Arrays `[n_rows]` by name.
        """
        return {}

    def fire(self, event: Callable[..., Any], where: np.ndarray | None = None, **attributes: Any) -> None:
        """Fire an event, at most once per step in each simulation (and group of the event's statistics).

        :param event: The event's interface method.
        :param where: bool `[n_envs]`: the simulations in which it occurred; `None`: all.
        :param attributes: The event's attributes: arrays `[n_envs]`, or one value for all.
        """
        self.fired.append(FiredEvent(event, where, attributes))

    # -- episodes, for one environment and for many -----------------------------------------------------

    def begin(self, rows: np.ndarray) -> None:
        """Begin new episodes in some of the simulations.

        :param rows: Their indices, `[n_rows]`.
        """
        self.elapsed[rows] = 0
        self.reset_rows(rows)

    def advance(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a sub-step and advance to the next one.

        :param actions: Arrays `[n_envs, ...]` by action key.
        :return: Rewards, whether episodes terminated, whether they were truncated (:attr:`nobody` if none was);
            `[n_envs]` each.
        """
        self.fired.clear()
        rewards, terminated, *others = self.step(actions)
        self.substep = (self.substep + 1) % len(self.step_keys)
        if self.substep:
            if terminated.any() or (others and others[0].any()):
                raise EnvironmentContractError(
                    f"{type(self).__name__}: an episode ended with the sub-step {self.step_keys[self.substep - 1]!r}; "
                    f"in a batch episodes end with the last sub-step of a step, {self.step_keys[-1]!r}."
                )
            return rewards, terminated, self.nobody
        self.elapsed += _ONE
        if self.pausing is not None:
            self.elapsed[self.pausing] = 0
            self.pausing = None
        truncated = others[0] if others else self.nobody
        if self.max_episode_steps is not None:
            is_late = self.elapsed >= self.max_episode_steps
            truncated = is_late | truncated if others else is_late
        return rewards, terminated, self.cut_off(truncated, terminated)

    def cut_off(self, truncated: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        """Return which episodes were truncated and did not terminate, bool `[n_envs]`; :attr:`nobody` if none was."""
        if not np.count_nonzero(truncated):
            return self.nobody
        cut_off: np.ndarray = np.greater(truncated, terminated)
        return cut_off

    @property
    def is_step_complete(self) -> bool:
        """Whether the last sub-step completed a step."""
        return self.substep == 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays `[n_envs, ...]` of the state, by name."""
        return {name: getattr(self, name) for name in self.row_arrays}

    def seed_row(self, row: int, seed: int) -> None:
        """Seed the random generator of a simulation.

        :param row: Its index.
        :param seed: Any integer.
        """
        self.random.seed(row, seed)

    def close(self) -> None:
        """Release the resources of the simulations. Default: there are none."""

    def why_not_kept(self) -> str | None:
        """Return why :meth:`row_state` does not hold the complete state; `None`: it does."""
        return None

    def row_state(self, row: int) -> dict[str, Any]:
        """Return the complete state of a simulation.

        :param row: Its index.
        """
        arrays = {name: np.array(array[row]) for name, array in self.arrays().items()}
        return {"arrays": arrays, "elapsed": int(self.elapsed[row]), "random": self.random.state(row)}

    def load_row_state(self, row: int, state: Mapping[str, Any]) -> None:
        """Restore the state of a simulation; the sub-step is common to all.

        :param row: Its index.
        :param state: Result of :meth:`row_state`.
        """
        arrays = self.arrays()
        for name, value in state["arrays"].items():
            arrays[name][row] = value
        self.elapsed[row] = state["elapsed"]
        self.random.load_state(row, state["random"])
