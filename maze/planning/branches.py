"""Copies of environments at a decision, stepped side by side: one interface for arrays and for single environments."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from maze.core.annotations import override
from maze.core.env.batched_core_env import BatchedCoreEnv, scenario_seed
from maze.core.env.batched_maze_env import BatchedMazeEnv
from maze.core.env.space_values import zeros
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.wrappers.time_limit_wrapper import TimeLimitWrapper
from maze.core.wrappers.wrapper import PassiveWrapper
from maze.utils.check_env import has_chance


class SingleState(NamedTuple):
    """A decision in a single environment.

    :param env: The environment; it is not stepped.
    :param observation: Observation of its actor.
    """

    env: Any
    observation: Mapping[str, Any]


@dataclass(eq=False)
class Group:
    """Branches that are at the same actor.

    :param actor_id: The actor that acts next.
    :param rows: Indices of the branches, `[n_rows]`. Those that have ended may be among them; their actions do not
        count.
    :param observations: Arrays `[n_rows, ...]` by key, or a dictionary for each branch.
    :param envs: Their environments, for policies that need one; `None`: there are arrays only.
    :param arrays: The arrays that make up the states, `[n_rows, ...]` by name, where there are no environments.
    """

    actor_id: ActorID
    rows: np.ndarray
    observations: Mapping[str, np.ndarray] | Sequence[Mapping[str, Any]]
    envs: Sequence[Any] | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def stacked(self) -> Mapping[str, np.ndarray]:
        """Return the observations, arrays `[n_rows, ...]` by key."""
        if isinstance(self.observations, Mapping):
            return self.observations
        first, *_ = self.observations
        return {key: np.stack([np.asarray(each[key]) for each in self.observations]) for key in first}

    def maze_state(self, index: int) -> Any:
        """Return the state of one of the branches, as a single environment has it.

        :param index: Position in :attr:`rows`, not the index of the branch.
        :return: The state; where there are arrays only, copies of the branch's arrays by name.
        """
        if self.envs is not None:
            return self.envs[index].get_maze_state()
        return {name: np.array(array[index]) for name, array in self.arrays.items()}

    def single(self, index: int) -> Mapping[str, Any]:
        """Return the observation of one of the branches.

        :param index: Position in :attr:`rows`, not the index of the branch.
        :return: Values by key, which may be views of the arrays.
        """
        if isinstance(self.observations, Mapping):
            return {key: array[index] for key, array in self.observations.items()}
        return self.observations[index]


Actions = Mapping[str, np.ndarray] | Sequence[Mapping[str, Any]]
"""Actions of a group: arrays `[n_rows, ...]` by key, or a dictionary for each branch."""


class Branches(ABC):
    """Copies of environments that are stepped side by side, each in a scenario: one realisation of the random future.

    Branches of the same scenario share their random numbers. With arrays they do so step by step; a single
    environment draws from one generator per scenario, which stays common as long as siblings draw equally often.

    :param gamma: Discount factor of the returns, per environment step.
    """

    most_rows: ClassVar[int] = 4096
    """So many branches are worth forking at once: more arrays do not fit into the processor's cache."""

    def __init__(self, gamma: float = 1.0) -> None:
        self.gamma = gamma
        self.done = np.zeros(0, np.bool_)
        """bool `[n_rows]`: whose episode has ended."""
        self.returns = np.zeros(0)
        """`[n_rows]`: discounted rewards since the fork."""
        self.steps = np.zeros(0, np.int64)
        """`[n_rows]`: environment steps completed since the fork."""
        self.n_decisions = 0
        """Sub-steps simulated so far, in all forks."""

    def fork(self, source: Any, rows: np.ndarray, scenarios: np.ndarray, seed: int | None) -> None:
        """Begin branches.

        :param source: The states: simulations (:class:`~maze.core.env.batched_core_env.BatchedCoreEnv`), or a sequence
            of :class:`SingleState`.
        :param rows: For each branch the index of its state, `[n_rows]`.
        :param scenarios: For each branch the scenario, integers `[n_rows]`.
        :param seed: Seed of the scenarios; `None`: all branches have the future of their state (clairvoyant).
        """
        self._clear(len(rows))
        self._fork(source, np.asarray(rows), np.asarray(scenarios), seed)

    def continue_from(self, other: Branches, rows: np.ndarray) -> None:
        """Take over branches of another object with their returns; one may be taken over many times.

        :param other: Branches of the same environment, not this object. All have the same new future: for deterministic
            environments.
        :param rows: Indices of its branches, `[n_rows]`.
        """
        self.fork(other.states(), rows, np.zeros(len(rows), np.int64), seed=0)
        self.done, self.returns, self.steps = other.done[rows], other.returns[rows], other.steps[rows]

    def begin(self, seeds: Sequence[int]) -> None:
        """Begin episodes instead of branches.

        :param seeds: A seed for each episode.
        """
        self._clear(len(seeds))
        self._begin(seeds)

    def _clear(self, n_rows: int) -> None:
        self.done, self.returns, self.steps = np.zeros(n_rows, np.bool_), np.zeros(n_rows), np.zeros(n_rows, np.int64)

    @abstractmethod
    def states(self) -> Any:
        """Return the present states, the source of other branches' :meth:`fork`; ended ones are not defined."""

    @abstractmethod
    def _begin(self, seeds: Sequence[int]) -> None: ...

    @abstractmethod
    def _fork(self, source: Any, rows: np.ndarray, scenarios: np.ndarray, seed: int | None) -> None: ...

    @abstractmethod
    def observe(self, horizon: int | None = None) -> list[Group]:
        """Return the branches that have not ended, by actor.

        :param horizon: Leave out branches that have completed so many environment steps.
        """

    @abstractmethod
    def step(self, decisions: Sequence[tuple[Group, Actions]]) -> None:
        """Take one sub-step in the branches of some groups.

        :param decisions: Groups that :meth:`observe` or :meth:`actors` returned last, with their actions.
        """

    def actors(self) -> list[Group]:
        """Return the branches that have not ended, by actor; observations may be out of date."""
        return self.observe()

    def close(self) -> None:
        """Release the copies."""


class ArrayBranches(Branches):
    """Branches in the rows of a vectorised simulation.

    :param make: Makes the simulation for a number of environments.
    :param gamma: Discount factor.
    """

    def __init__(self, make: Callable[[int], BatchedCoreEnv], gamma: float = 1.0) -> None:
        super().__init__(gamma)
        self._make = make
        self._simulations: dict[int, BatchedCoreEnv] = {}
        self._buffers: dict[tuple[int, int], tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = {}

    @override(Branches)
    def _fork(self, source: BatchedCoreEnv, rows: np.ndarray, scenarios: np.ndarray, seed: int | None) -> None:
        size, simulation = self._sized(len(rows))
        everyone = slice(0, size)
        simulation.copy_rows(source, _padded(rows, size), everyone, with_random=seed is None)
        if seed is not None:
            simulation.new_futures(everyone, _padded(scenarios, size), seed)

    @override(Branches)
    def _begin(self, seeds: Sequence[int]) -> None:
        size, simulation = self._sized(len(seeds))
        for row, seed in enumerate(_padded(np.asarray(seeds), size).tolist()):
            simulation.seed_row(row, seed)
        simulation.substep = 0
        simulation.begin(np.arange(size))

    @override(Branches)
    def states(self) -> BatchedCoreEnv:
        return self._simulation

    def _sized(self, n_rows: int) -> tuple[int, BatchedCoreEnv]:
        """Return the simulation for a number of branches, and its size."""
        size = _size(n_rows)
        if size not in self._simulations:
            self._simulations[size] = self._make(size)
        self._simulation = self._simulations[size]
        return size, self._simulation

    @override(Branches)
    def observe(self, horizon: int | None = None) -> list[Group]:
        simulation = self._simulation
        if self.done.all() or (horizon is not None and self.steps[0] >= horizon):
            return []
        simulation.observe(self._buffers_of(simulation)[0])
        return self.actors()

    @override(Branches)
    def actors(self) -> list[Group]:
        simulation, n_rows = self._simulation, len(self.done)
        seen = {key: array[:n_rows] for key, array in self._buffers_of(simulation)[0].items()}
        actor = ActorID(simulation.step_keys[simulation.substep], 0)
        return [Group(actor, np.arange(n_rows), seen, arrays=simulation.arrays())]

    @override(Branches)
    def step(self, decisions: Sequence[tuple[Group, Actions]]) -> None:
        ((_, actions),) = decisions
        simulation, n_rows = self._simulation, len(self.done)
        _, taken = self._buffers_of(simulation)
        if not isinstance(actions, Mapping):
            actions = {key: np.stack([np.asarray(each[key]) for each in actions]) for key in taken}
        for key, array in taken.items():
            array[:n_rows] = actions[key]
            array[n_rows:] = array[0]
        rewards, terminated, truncated = simulation.advance(taken)
        is_running = ~self.done
        self.n_decisions += int(np.count_nonzero(is_running))
        self.returns += np.where(is_running, self.gamma ** self.steps[0] * rewards[:n_rows], 0.0)
        if simulation.is_step_complete:
            self.steps += 1
        if (over := terminated | truncated).any():
            self.done |= over[:n_rows]
            running = np.flatnonzero(~self.done)
            if len(running):  # rows that have ended follow one that has not: a simulation need not step ended episodes
                ended = np.flatnonzero(over | np.append(self.done, np.zeros(len(over) - n_rows, np.bool_)))
                simulation.copy_rows(simulation, np.full(len(ended), running[0]), ended, with_random=False)

    def _buffers_of(self, simulation: BatchedCoreEnv) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Return arrays for observations and actions of the sub-step."""
        key = simulation.n_envs, simulation.substep
        if key not in self._buffers:
            step_key, leading = simulation.step_keys[simulation.substep], (simulation.n_envs,)
            self._buffers[key] = (
                zeros({step_key: simulation.observation_spaces[step_key]}, leading, "observation")[step_key],
                zeros({step_key: simulation.action_spaces[step_key]}, leading, "action")[step_key],
            )
        return self._buffers[key]

    @override(Branches)
    def close(self) -> None:
        for simulation in self._simulations.values():
            simulation.close()
        self._simulations.clear()


class SingleBranches(Branches):
    """Branches in copies of a single environment.

    :param env: The environment to copy, with its wrappers; it is not stepped.
    :param gamma: Discount factor.
    """

    most_rows = 32

    def __init__(self, env: Any, gamma: float = 1.0) -> None:
        super().__init__(gamma)
        self._template = copy.deepcopy(env)
        self._template.reset()
        self._copies: list[Any] = []
        counts = env.agent_counts_dict
        self._only_actor = ActorID(next(iter(counts)), 0) if list(counts.values()) == [1] else None

    @override(Branches)
    def _fork(self, source: Sequence[SingleState], rows: np.ndarray, scenarios: np.ndarray, seed: int | None) -> None:
        self._provide(len(rows))
        self._observations: list[Any] = []
        for env, row, scenario in zip(self._copies, rows.tolist(), scenarios.tolist(), strict=False):
            env.clone_from(source[row].env)
            if seed is not None:
                env.new_future(scenario_seed(seed, scenario))
            self._observations.append(source[row].observation)

    @override(Branches)
    def _begin(self, seeds: Sequence[int]) -> None:
        self._provide(len(seeds))
        self._observations = []
        for env, seed in zip(self._copies, seeds, strict=False):
            env.seed(seed)
            self._observations.append(env.reset())

    @override(Branches)
    def states(self) -> list[SingleState]:
        return [SingleState(*state) for state in zip(self._copies, self._observations, strict=False)]

    def _provide(self, n_rows: int) -> None:
        while len(self._copies) < n_rows:
            self._copies.append(copy.deepcopy(self._template))

    @override(Branches)
    def observe(self, horizon: int | None = None) -> list[Group]:
        rows = np.flatnonzero(~self.done if horizon is None else ~self.done & (self.steps < horizon))
        if not len(rows):
            return []
        if self._only_actor is not None:
            return [self._group(self._only_actor, rows.tolist())]
        by_actor: dict[ActorID, list[int]] = {}
        for row in rows.tolist():
            by_actor.setdefault(self._copies[row].actor_id(), []).append(row)
        return [self._group(actor, of_actor) for actor, of_actor in by_actor.items()]

    def _group(self, actor: ActorID, rows: list[int]) -> Group:
        return Group(
            actor, np.array(rows), [self._observations[row] for row in rows], [self._copies[row] for row in rows]
        )

    @override(Branches)
    def step(self, decisions: Sequence[tuple[Group, Actions]]) -> None:
        for group, given in decisions:
            actions: Any = given
            if isinstance(given, Mapping):
                actions = [{key: array[index] for key, array in given.items()} for index in range(len(group.rows))]
            rewards, are_complete = [], []
            for row, env, action in zip(group.rows.tolist(), group.envs or (), actions, strict=True):
                self._observations[row], reward, done, _ = env.step(action)
                rewards.append(reward)
                are_complete.append(done or env.context.is_step_complete)
                if done:
                    self.done[row] = True
            rows = group.rows
            discount = self.gamma ** self.steps[rows] if self.gamma != 1.0 else 1.0
            self.returns[rows] += discount * np.array(rewards)
            self.steps[rows] += are_complete
            self.n_decisions += len(rows)

    @override(Branches)
    def close(self) -> None:
        for env in (self._template, *self._copies):
            env.close()
        self._copies.clear()


def branches_of(env: Any, simulation: BatchedMazeEnv | None, gamma: float) -> Branches:
    """Return branches in arrays if there is a vectorised simulation, otherwise in copies of a single environment.

    :param env: The environment with its wrappers.
    :param simulation: Its vectorised simulation, see :func:`simulation_of`; `None`: single environments are needed.
    :param gamma: Discount factor.
    """
    return SingleBranches(env, gamma) if simulation is None else ArrayBranches(simulation.batch, gamma)


def chance_in(env: Any, where: str) -> bool:
    """Return whether an environment of which copies are made is stochastic.

    :param env: The environment; it is left as it is.
    :param where: The component that needs the copies, for messages.
    :raises ConfigError: It cannot be copied, or copies cannot get new futures.
    """
    try:
        twin = copy.deepcopy(env)
        twin.seed(1)
        twin.reset()
        copy.deepcopy(env).clone_from(twin)
        return has_chance(twin)
    except NotImplementedError as error:
        raise ConfigError(f"{where} needs copies of the environment: {error}") from error


def without_recorders(env: Any) -> Any:
    """Return the environment inside of wrappers that only record."""
    while issubclass(type(env), PassiveWrapper):
        env = env.env
    return env


def simulation_of(env: Any) -> tuple[BatchedMazeEnv, int | None] | None:
    """Return the environment of a vectorised simulation that no wrapper separates from it, or `None`.

    :param env: An environment with its wrappers.
    :return: It, and the number of environment steps that a time limit leaves; `None`: there are other wrappers, or it
        is not made of such a simulation.
    """
    remaining: int | None = None
    env = without_recorders(env)
    while issubclass(type(env), TimeLimitWrapper):
        left = env.remaining_steps()
        remaining = left if remaining is None else min(remaining, left if left is not None else remaining)
        env = without_recorders(env.env)
    if not issubclass(type(env), BatchedMazeEnv):
        return None
    core_env = env.core_env
    return (env, remaining) if not core_env.is_simulated or core_env.simulation.seeds_rows else None


def stack_of(env: Any) -> list[Any]:
    """Return the wrappers of an environment, outermost first, and the environment itself as the last entry.

    :param env: A Maze environment with its wrappers. Recorders around it are left out.
    """
    layers = [without_recorders(env)]
    while layers[-1].env is not layers[-1].core_env:
        layers.append(layers[-1].env)
    return layers


def _size(n_rows: int) -> int:
    """Return the number of simulations for a number of branches: few different ones, at most a third too many."""
    power = 1 << max(0, (n_rows - 1).bit_length())
    return 3 * power // 4 if power >= 4 and n_rows <= 3 * power // 4 else power


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    return np.concatenate([values, np.full(size - len(values), values[0], values.dtype)])
