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

from maze.core.env.context import CONTEXT, GRID, Context, InstanceSet, InstanceSource
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError

# Number of random numbers that are generated at once.
_BLOCK = 512

# An array, because a number would be converted at each use.
_ONE = np.array(1)

_WORD = 2**64 - 1
_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_DRAWS_OF_STEP = np.uint64(2**32 - 1)
# Keeps the numbers of a planner apart from those of an environment with the same seed.
_FUTURE = 0x6D617A655F706C61


def _mixed(word: int) -> int:
    """Hash 64 bits."""
    return int(_mix(np.array([word & _WORD], np.uint64))[0])


def _mix(words: np.ndarray) -> np.ndarray:
    """Hash words of 64 bits in place: the output function of SplitMix64 (Steele, Lea and Flood 2014)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def scenario_seed(seed: int, scenario: int) -> int:
    """Return the seed of a scenario for generators of single environments.

    :param seed: Seed of all scenarios, any integer.
    :param scenario: Number of the scenario.
    :return: An integer of 31 bits, the same for the same arguments.
    """
    return _mixed(_mixed(int(seed) % 2**64) + int(scenario) * int(_STRIDE) & _WORD) >> 33


class RowGenerators:
    """Uniform random numbers for vectorised simulations.

    The numbers of a row depend on its seed and on the number of values taken only, not on other rows. `new_futures`
    replaces the generator of a row by that of a scenario, whose numbers depend on the scenario and on the step only, so
    that rows of the same scenario share them.

    :param n_rows: Number of rows, each of which begins with a seed from the operating system.
    """

    def __init__(self, n_rows: int) -> None:
        self._seeds = np.frombuffer(os.urandom(8 * n_rows), np.uint64).copy()
        self._blocks = np.full(n_rows, -1)
        self._positions = np.full(n_rows, _BLOCK)
        self._numbers = np.zeros((n_rows, _BLOCK))
        self._all = np.arange(n_rows)
        self._has_scenarios = False
        self._is_scenario = np.zeros(n_rows, np.bool_)
        self._keys = np.zeros(n_rows, np.uint64)
        # By row of a scenario, the step in the upper and the numbers taken in it in the lower 32 bits.
        self._counters = np.zeros(n_rows, np.uint64)

    def seed(self, row: int, seed: int) -> None:
        """Seed the generator of a row.

        :param row: The row.
        :param seed: Any integer.
        """
        self._seeds[row] = int(seed) % 2**64
        self._blocks[row] = -1
        self._positions[row] = _BLOCK
        self._is_scenario[row] = False

    def new_futures(self, rows: np.ndarray | slice, scenarios: np.ndarray | int, seed: int) -> None:
        """Replace the streams of rows by those of scenarios.

        Number `k` of step `t` after this call is a hash of seed, scenario, `t` and `k` (counter-based, SplitMix64).

        :param rows: Indices of the rows, `[n_rows]`.
        :param scenarios: Their scenarios, `[n_rows]`, or one for all.
        :param seed: Seed of the scenarios, any integer.
        """
        key = np.uint64(_mixed(_mixed(int(seed) % 2**64) ^ _FUTURE))
        words = np.atleast_1d(np.asarray(scenarios, np.uint64)) * _STRIDE
        words += key
        self._keys[rows] = _mix(words)
        self._counters[rows] = 0
        self._is_scenario[rows] = self._has_scenarios = True

    def begin_step(self) -> None:
        """Align rows of scenarios: the coming step has the same numbers in all rows of a scenario."""
        if self._has_scenarios:
            self._counters |= _DRAWS_OF_STEP
            self._counters += np.uint64(1)

    def copy(self, source: RowGenerators, rows: np.ndarray, into: np.ndarray | slice) -> None:
        """Take over streams: the rows `into` draw what `rows` of another object would draw.

        :param source: The other object.
        :param rows: Indices of its rows, `[n]`.
        :param into: Indices of the rows that take over, `[n]`, or a slice of them.
        """
        self._has_scenarios = self._has_scenarios or source._has_scenarios
        for name in ("_seeds", "_blocks", "_positions", "_numbers", "_is_scenario", "_keys", "_counters"):
            _copy_rows(getattr(source, name), rows, getattr(self, name), into)

    def uniform(self, rows: np.ndarray | None = None, count: int = 1) -> np.ndarray:
        """Return the next numbers of some rows, in [0, 1).

        :param rows: Indices of the rows; `None`: all.
        :param count: Number of values per row, at most 512.
        :return: `[n_rows]` for a single number, else `[n_rows, count]`.
        """
        rows = self._all if rows is None else rows
        if not self._has_scenarios:
            return self._of_blocks(rows, count)
        numbers = self._of_scenarios(rows, count)
        others = np.flatnonzero(~self._is_scenario[rows])
        if len(others):
            numbers[others] = self._of_blocks(rows[others], count)
        return numbers

    def _of_scenarios(self, rows: np.ndarray, count: int) -> np.ndarray:
        counters = self._counters[rows]
        self._counters[rows] = counters + np.uint64(count)
        words = counters * _STRIDE
        words += self._keys[rows]
        if count > 1:
            words = words[:, None] + np.arange(count, dtype=np.uint64) * _STRIDE
        numbers: np.ndarray = (_mix(words) >> np.uint64(11)) * 2.0**-53
        return numbers

    def _of_blocks(self, rows: np.ndarray, count: int) -> np.ndarray:
        positions = self._positions[rows]
        spent = rows[positions + count > _BLOCK]
        if len(spent):
            self._refill(spent)
            positions = self._positions[rows]
        self._positions[rows] = positions + count
        places = (rows, positions) if count == 1 else (rows[:, None], positions[:, None] + np.arange(count))
        numbers: np.ndarray = self._numbers[places]
        return numbers

    def state(self, row: int) -> dict[str, int]:
        """Return the position of the generator of a row.

        :param row: Index of the row.
        :return: Integers, for :meth:`load_state`.
        """
        state = {"seed": int(self._seeds[row]), "block": int(self._blocks[row]), "position": int(self._positions[row])}
        if self._is_scenario[row]:
            state |= {"key": int(self._keys[row]), "counter": int(self._counters[row])}
        return state

    def load_state(self, row: int, state: Mapping[str, int]) -> None:
        """Restore a position of :meth:`state`.

        :param row: Index of the row.
        :param state: Result of :meth:`state`.
        """
        self._is_scenario[row] = is_scenario = "key" in state
        if is_scenario:
            self._has_scenarios = True
            self._keys[row], self._counters[row] = state["key"], state["counter"]
        self._seeds[row] = state["seed"] % 2**64
        self._blocks[row] = state["block"] - 1
        self._refill([row])
        self._positions[row] = state["position"]

    def _refill(self, rows: Sequence[int] | np.ndarray) -> None:
        for row in rows:
            block = int(self._blocks[row]) + 1
            self._blocks[row] = block
            if block >= 0:
                self._numbers[row] = np.random.default_rng((int(self._seeds[row]), block)).random(_BLOCK)
            self._positions[row] = 0 if block >= 0 else _BLOCK


def _copy_rows(source: np.ndarray, rows: np.ndarray, target: np.ndarray, into: np.ndarray | slice) -> None:
    if isinstance(into, slice) and source.dtype == target.dtype:
        np.take(source, rows, axis=0, out=target[into], mode="clip")  # no array in between
    else:
        target[into] = source[rows]


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

    instance_arrays: ClassVar[tuple[str, ...]] = ()
    """Names of the arrays that an instance set must have, see :meth:`load_instances`."""

    context_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the parameters that a context may have, see :meth:`use_context`."""

    def __init__(
        self,
        n_envs: int,
        action_spaces: Mapping[StepKeyType, spaces.Dict],
        observation_spaces: Mapping[StepKeyType, spaces.Dict],
        max_episode_steps: int | None = None,
    ) -> None:
        if list(action_spaces) != list(observation_spaces):
            raise ConfigError(f"{self}: expected equal sub-steps, found {[*action_spaces]}, {[*observation_spaces]}.")
        self.n_envs = n_envs
        self.action_spaces = dict(action_spaces)
        self.observation_spaces = dict(observation_spaces)
        self.max_episode_steps = max_episode_steps
        self.step_keys = list(action_spaces)
        self.substep = 0
        """Position in `step_keys` of the sub-step that is taken next."""
        self.elapsed = np.zeros(n_envs, np.int64)
        """Steps of the running episodes."""
        self.random = RowGenerators(n_envs)
        self.instance_set: InstanceSet | None = None
        """Instances that episodes play, see :meth:`use_instances`; `None`: there are none."""
        self.instance = np.full(n_envs, -1)
        """Index of the instance of each running episode; -1: none of the set."""
        self.next_instance = np.arange(n_envs)
        """Index of the instance of each following episode, modulo the number of instances."""
        self.context: Context | None = None
        """Parameters that are drawn for each episode; `None`: there are none."""
        self.context_values = np.zeros((n_envs, 0))
        """Stored values of the parameters in the running episodes, `[n_envs, n_parameters]`."""
        self.fired: list[FiredEvent] = []
        """The events of the last sub-step."""
        self.no_rows = np.zeros(n_envs, np.bool_)
        """bool `[n_envs]`, all false; compared by identity to skip further checks."""
        self.no_rows.flags.writeable = False
        self.autoreset_pending: np.ndarray | None = None
        """Indices of simulations with a pending autoreset: the next step begins their episode and ignores their action;
        `None`: there are none. See :class:`~maze.core.wrappers.gym_vector_env.GymBatch`."""

    def __repr__(self) -> str:
        return type(self).__name__

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
        """Write the observations of the sub-step `step_keys[substep]`. The base method writes the context.

        :param out: Arrays `[n_envs, ...]` by observation key.
        """
        if self.context is not None:
            out[CONTEXT][...] = self.context.observed(self.context_values)

    def kpis(self, rows: np.ndarray) -> Mapping[str, np.ndarray]:
        """Return key performance indicators of ended episodes. Default: the values of the context.

        :param rows: Indices of the simulations.
        :return: Arrays `[n_rows]` by name.
        """
        if self.context is None:
            return {}
        values = self.context_values[rows]
        return {f"{CONTEXT}/{name}": values[:, index] for index, name in enumerate(self.context.names)}

    @property
    def has_kpis(self) -> bool:
        """Whether episodes have KPIs."""
        return self.context is not None or type(self).kpis is not BatchedCoreEnv.kpis

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
        if self.context is not None:
            self.context_values[rows] = self.context.drawn(
                self.random.uniform(rows, len(self.context.names)).reshape(len(rows), -1)
            )
        if self.instance_set is None:
            self.reset_rows(rows)
            return
        self.instance[rows] = instance = self.next_instance[rows] % len(self.instance_set)
        self.next_instance[rows] = instance + 1
        self._begin_instances(rows, self.instance_set.rows(instance))

    def _begin_instances(self, rows: np.ndarray, instances: dict[str, np.ndarray]) -> None:
        for index, name in enumerate(self.context.names if self.context is not None else ()):
            if (values := instances.pop(f"{CONTEXT}/{name}", None)) is not None:
                self.context_values[rows, index] = values
        if instances:
            self.load_instances(rows, instances)
        else:
            self.reset_rows(rows)

    def use_context(self, parameters: Mapping[str, Any] | None, instances: InstanceSource | None = None) -> None:
        """Draw parameters of the problem for each episode; a constructor calls it last.

        The observation `context` (float32 in [0, 1]) is added to each sub-step: numbers scaled to their range, texts as
        one of n. Each value is a KPI `context/<name>` of its episode.

        :param parameters: By name the values, see :class:`Context`; `None`: constant parameters.
        :param instances: As for :meth:`use_instances`; its arrays `context/<name>` replace drawn values. `grid`: all
            combinations of values.
        :raises ConfigError: A parameter is unknown or cannot be read, or the instances do not fit.
        """
        if parameters:
            self.context = Context(parameters, self.context_parameters)
            self.context_values = np.zeros((self.n_envs, len(self.context.names)))
            seen = spaces.Box(0.0, 1.0, (self.context.size,), np.float32)
            self.observation_spaces = {
                key: spaces.Dict({**space.spaces, CONTEXT: seen}) for key, space in self.observation_spaces.items()
            }
        if instances == GRID:
            if self.context is None:
                raise ConfigError("env.instances=grid: expected env.context with the values of parameters, found none.")
            self.instance_set = InstanceSet(self.context.instances())
        else:
            self.use_instances(instances)

    def parameter(self, name: str) -> np.ndarray | None:
        """Return a parameter of the context in the running episodes: stored values `[n_envs]`; `None`: it is constant.

        :param name: The name.
        """
        if self.context is None or name not in self.context.names:
            return None
        return self.context_values[:, self.context.names.index(name)]

    def use_instances(self, instances: InstanceSource | None) -> None:
        """Play the instances of a set, each once and in order; the last call of a constructor.

        After :meth:`seed_row` a simulation plays instance `seed mod n_instances`, then the following ones.

        :param instances: The set, its arrays or its file; `None`: none.
        :raises ConfigError: The file cannot be read, or its arrays do not fit.
        """
        if instances is None:
            return
        self.instance_set = InstanceSet.of(instances)
        self.instance_set.require(self.instance_arrays, str(self))
        first = np.zeros(1, np.int64)
        try:
            self._begin_instances(first, self.instance_set.rows(first))
        except (ValueError, IndexError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{self.instance_set.origin}: the arrays do not fit {self}.load_instances: {error}"
            ) from error

    @property
    def n_instances(self) -> int:
        """Number of instances of the set; 0: there is none."""
        return 0 if self.instance_set is None else len(self.instance_set)

    def load_instances(self, rows: np.ndarray, instances: Mapping[str, np.ndarray]) -> None:
        """Begin new episodes with given instances, in place of :meth:`reset_rows`. Default: an error.

        :param rows: Indices of the simulations, `[n_rows]`.
        :param instances: Arrays `[n_rows, ...]` of the instance set by name, one instance for each simulation.
        """
        raise ConfigError(f"env.instances: {self} has no instance sets; it needs load_instances and use_instances.")

    def advance(self, actions: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Take a sub-step and advance to the next one.

        :param actions: Arrays `[n_envs, ...]` by action key.
        :return: Rewards, whether episodes terminated, whether they were truncated (:attr:`no_rows` if none was);
            `[n_envs]` each.
        """
        self.fired.clear()
        self.random.begin_step()
        rewards, terminated, *others = self.step(actions)
        self.substep = (self.substep + 1) % len(self.step_keys)
        if self.substep:
            if terminated.any() or (others and others[0].any()):
                raise EnvironmentContractError(
                    f"{self}: an episode ended with the sub-step "
                    f"{self.step_keys[self.substep - 1]!r}; expected {self.step_keys[-1]!r}."
                )
            return rewards, terminated, self.no_rows
        self.elapsed += _ONE
        if self.autoreset_pending is not None:
            self.elapsed[self.autoreset_pending] = 0
            self.autoreset_pending = None
        truncated = others[0] if others else self.no_rows
        if self.max_episode_steps is not None:
            is_late = self.elapsed >= self.max_episode_steps
            truncated = is_late | truncated if others else is_late
        return rewards, terminated, self.cut_off(truncated, terminated)

    def cut_off(self, truncated: np.ndarray, terminated: np.ndarray) -> np.ndarray:
        """Return which episodes were truncated and did not terminate, bool `[n_envs]`; :attr:`no_rows` if none was.

        :param truncated: Episodes at a limit, bool `[n_envs]`.
        :param terminated: Episodes that terminated, bool `[n_envs]`.
        """
        if not np.count_nonzero(truncated):
            return self.no_rows
        cut_off: np.ndarray = np.greater(truncated, terminated)
        return cut_off

    @property
    def is_step_complete(self) -> bool:
        """Whether the last sub-step completed a step."""
        return self.substep == 0

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays `[n_envs, ...]` of the state, by name."""
        of_instances = ("instance", "next_instance") if self.instance_set is not None else ()
        of_context = ("context_values",) if self.context is not None else ()
        return {name: getattr(self, name) for name in (*self.row_arrays, *of_instances, *of_context)}

    def seed_row(self, row: int, seed: int) -> None:
        """Seed the random generator of a simulation.

        :param row: Its index.
        :param seed: Any integer.
        """
        self.random.seed(row, seed)
        if self.instance_set is not None:
            self.next_instance[row] = int(seed) % len(self.instance_set)

    def copy_rows(
        self, source: BatchedCoreEnv, rows: np.ndarray, into: np.ndarray | slice, with_random: bool = True
    ) -> None:
        """Take over simulations; a row may be copied many times.

        All simulations of this object are then at the sub-step of `source`.

        :param source: Simulations of the same problem, of any number; may be this object.
        :param rows: Indices of simulations of `source`, `[n_rows]`.
        :param into: Indices of the simulations that become copies of them, `[n_rows]`; a slice is fastest.
        :param with_random: Copy the random streams, so that copies have the future that `source` is going to have.
            False: the caller replaces them with :meth:`new_futures`, as planning needs it.
        """
        if (problem := source.why_not_kept()) is not None:
            raise EnvironmentContractError(f"{source} cannot be copied: {problem}.")
        if not self.seeds_rows and source.n_envs > 1:
            raise EnvironmentContractError(
                f"{self} cannot be copied by rows, which share one state; copy single environments."
            )
        self.substep = source.substep
        if type(self).row_state is not BatchedCoreEnv.row_state:  # there is more to its state than arrays
            states = [source.row_state(row) for row in rows.tolist()]
            for row, state in zip(np.arange(self.n_envs)[into].tolist(), states, strict=True):
                self.load_row_state(row, state)
            return
        theirs = source.arrays()
        for name, array in self.arrays().items():
            _copy_rows(theirs[name], rows, array, into)
        if "elapsed" not in theirs:
            self.elapsed[into] = source.elapsed[rows]
        if with_random:
            self.random.copy(source.random, rows, into)

    def new_futures(self, rows: np.ndarray | slice, scenarios: np.ndarray | int, seed: int) -> None:
        """Replace the random numbers of the running episodes; the state stays.

        Random numbers then depend only on the scenario and on the number of the step (since this call): simulations of
        the same scenario share them, also after different actions. A simulation that draws its future in advance, such
        as all demands of an episode at its reset, overrides this and draws the undisclosed part again.

        :param rows: Indices of the simulations, `[n_rows]`.
        :param scenarios: Their scenarios, integers `[n_rows]`, or one for all.
        :param seed: Seed of the scenarios: any integer.
        """
        if not self.seeds_rows:
            raise EnvironmentContractError(
                f"{self}: rows share one random generator, so that they cannot get new futures; plan "
                "with a single environment, such as a `gymnasium.Env`, or with a `BatchedCoreEnv` with own generators."
            )
        self.random.new_futures(rows, scenarios, seed)

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
