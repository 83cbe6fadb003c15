"""A rollout as columns: arrays that are allocated once from the spaces, filled row by row and read by the trainer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.env.faults import Seeding
from maze.core.env.space_values import zeros
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError, NonFiniteError
from maze.core.rollout.batched_acting import Row

# Sub-steps of an environment step on average; beyond, an environment is taken for one that never completes one.
_MOST_SUBSTEPS = 1000

LogitsShapes = Mapping[StepKeyType, Mapping[str, Sequence[int]]]


class FinalObservationEntry(NamedTuple):
    """The last observation of an episode that ended within the rollout.

    :param tick: The tick with which it ended.
    :param env_index: The environment.
    :param actor_id: The actor that would have acted next.
    :param observation: Its observation.
    """

    tick: int
    env_index: int
    actor_id: ActorID
    observation: Row


class InitialHiddenStates(NamedTuple):
    """Hidden states of a recurrent policy at the begin of a rollout.

    :param begins: The environments that began an episode with the first tick, bool `[n_envs]`.
    :param states: Hidden states `[n_envs, size]` by actor and state key; zero for actors that are not there.
    """

    begins: np.ndarray
    states: Mapping[Any, Row]


class RolloutColumns:
    """Columns of a rollout of all environments of a vector environment.

    :param observation_spaces_dict: Observation spaces by sub-step key.
    :param action_spaces_dict: Action spaces by sub-step key.
    :param n_envs: Number of environments.
    :param n_ticks: Capacity in sub-step ticks: environment steps times sub-steps of a step.
    :param logits_shapes: Shapes of the logits by sub-step key and action key; None: logits are not recorded.
    :param n_steps: A rollout ends when its environments have completed this many environment steps each, on average,
        however many ticks that takes; None: it always takes `n_ticks`.
    :param n_constrained: Number of statistics whose values are recorded.
    """

    def __init__(
        self,
        observation_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        action_spaces_dict: Mapping[StepKeyType, spaces.Dict],
        n_envs: int,
        n_ticks: int,
        logits_shapes: LogitsShapes | None = None,
        *,
        n_steps: int | None = None,
        n_constrained: int = 0,
    ) -> None:
        self.n_ticks = n_ticks
        """Ticks of the rollout; while it is collected, its capacity."""
        self.capacity = n_ticks
        """Capacity in ticks."""
        self.n_steps = n_steps
        self.n_envs = n_envs
        self.substeps = {
            key: SubstepColumns(key, n_ticks, n_envs, space, action_spaces_dict[key], (logits_shapes or {}).get(key))
            for key, space in observation_spaces_dict.items()
        }
        self._all_by_tick = {
            "rewards": np.zeros((n_ticks, n_envs), np.float32),
            "terminated": np.zeros((n_ticks, n_envs), np.bool_),
            "truncated": np.zeros((n_ticks, n_envs), np.bool_),
            "step_complete": np.ones((n_ticks, n_envs), np.bool_),
            "constrained": np.zeros((n_ticks, n_envs, n_constrained), np.float32),
        }
        self.rewards: np.ndarray
        """float32 `[n_ticks, n_envs]`, as all arrays by tick"""
        self.terminated: np.ndarray
        self.truncated: np.ndarray
        self.step_complete: np.ndarray
        self.constrained: np.ndarray
        """float32 `[n_ticks, n_envs, n_statistics]`: values of constrained statistics in steps and ended episodes."""
        self.last_actor_ids: list[ActorID] = []
        """Next actors after the last tick, by environment."""
        self.actor_sequence: list[ActorID] | None = None
        """The actors of every environment step, in order; None if environments or steps differ in them."""
        self.infos: list[list[dict[Any, Any]]] | None = None
        """Per tick the infos of all environments; recorded if this is a list."""
        self.clear()

    @classmethod
    def for_env(cls, env: Any, n_steps: int, logits_shapes: LogitsShapes | None = None) -> RolloutColumns:
        """Return columns for rollouts in a vector environment.

        :param env: The vector environment.
        :param n_steps: Number of environment steps.
        :param logits_shapes: Shapes of the logits; None: logits are not recorded.
        """
        n_ticks, n_envs = n_steps * substeps_per_step(env.agent_counts_dict), env.n_rollout_envs
        return cls(
            *(env.observation_spaces_dict, env.action_spaces_dict, n_envs, n_ticks, logits_shapes),
            n_steps=n_steps,
            n_constrained=len(getattr(env, "constrained", ())),
        )

    def with_rewards(self, rewards: np.ndarray) -> RolloutColumns:
        """Return the rollout with other rewards, of which actors have none of their own; all else is shared.

        :param rewards: `[n_ticks, n_envs]`.
        """
        other = RolloutColumns.__new__(RolloutColumns)
        vars(other).update({**vars(self), "rewards": rewards, "actor_rewards": None})
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return the rollout without its storage: copies are read-only."""
        return {**vars(self), "_all_by_tick": {}, "hidden_states": None, "infos": None}

    @property
    def last_observations(self) -> dict[StepKeyType, Row]:
        """Observations of the next actors after the last tick: rows `[n_envs, ...]` by sub-step key."""
        substeps = self.substeps.items()
        return {key: {name: array[-1] for name, array in part.observations.items()} for key, part in substeps}

    def reserve(self, n_ticks: int) -> None:
        """Increase the capacity if it is smaller; filled rows stay.

        The arrays are replaced by longer ones: rows and arrays that were taken before no longer belong to the rollout.

        :param n_ticks: Required capacity in ticks.
        """
        if n_ticks <= self.capacity:
            return
        self.capacity = n_ticks
        self._all_by_tick = {name: _lengthened(array, n_ticks) for name, array in self._all_by_tick.items()}
        for name in ("actor_rewards", "actor_done"):
            if (array := getattr(self, name)) is not None:
                setattr(self, name, _lengthened(array, n_ticks))
        for columns in self.substeps.values():
            columns.reserve(n_ticks)
        self._show_ticks(n_ticks)

    def ticks_to_take(self, n_ticks: int, n_completed: int) -> int:
        """Return the number of ticks that the rollout has at least; `n_ticks` if it is complete.

        The capacity suffices for them.

        :param n_ticks: Number of ticks taken.
        :param n_completed: Number of environment steps completed, over all environments; a tick completes at most one
            of each.
        :raises EnvironmentContractError: The environments take ever more sub-steps without completing a step.
        """
        if self.n_steps is None:
            return self.n_ticks
        missing = self.n_steps * self.n_envs - n_completed
        if missing <= 0:
            return n_ticks
        if n_ticks == self.n_ticks:
            if n_ticks > _MOST_SUBSTEPS * self.n_steps:
                raise EnvironmentContractError(
                    f"A rollout of {self.n_steps} environment steps is not complete after {n_ticks} sub-steps: "
                    f"{self.n_envs} environments completed {n_completed} steps altogether. Does "
                    "`CoreEnv.is_step_complete()` ever return True?"
                )
            self.reserve(2 * n_ticks)
        return min(self.n_ticks, n_ticks + -(-missing // self.n_envs))

    def _show_ticks(self, n_ticks: int) -> None:
        self.n_ticks = n_ticks
        for name, array in self._all_by_tick.items():
            setattr(self, name, array[:n_ticks])

    def next_rows(self) -> dict[StepKeyType, Row]:
        """Return the rows that the next observations are written into, by sub-step key: those after the last tick."""
        return {key: columns.observation_rows[columns.n_rows] for key, columns in self.substeps.items()}

    def take_rows(
        self, tick: int, actors: Sequence[ActorID]
    ) -> tuple[dict[StepKeyType, Row], dict[StepKeyType, Row], dict[StepKeyType, Row | None]]:
        """Take the rows of a tick: observations, and those for actions and logits, by sub-step key.

        :param tick: Number of the tick.
        :param actors: The acting actors, by environment.
        """
        here: dict[StepKeyType, list[int]] = {}
        for index, actor in enumerate(actors):
            here.setdefault(actor.step_key, []).append(index)
        observations, actions, logits = {}, {}, {}
        for step_key, envs in here.items():
            substep = self.substeps[step_key]
            is_everywhere = len(envs) == self.n_envs
            row = substep.add_row(tick, None if is_everywhere else envs, [actors[index].agent_id for index in envs])
            observations[step_key] = substep.observation_rows[row]
            actions[step_key], logits[step_key] = substep.action_rows[row], substep.logits_rows[row]
        return observations, actions, logits

    def clear(self) -> None:
        """Restart with the first row."""
        for columns in self.substeps.values():
            columns.n_rows = 0
        self._show_ticks(self.capacity)
        self.actor_rewards: np.ndarray | None = None
        """float32 `[n_ticks, n_envs]`: the reward of the actor of each tick, where the environments report it."""
        self.actor_done: np.ndarray | None = None
        """bool `[n_ticks, n_envs]`: the actor left permanently with this tick; None if that is not known."""
        self.final_observations: list[FinalObservationEntry] = []
        """Last observations of truncated episodes."""
        self.terminal_observations: list[FinalObservationEntry] = []
        """Last observations of terminated episodes, if the vector environment keeps them."""
        self.renewed: list[int] = []
        """Environments that do not continue the previous rollout: they were reset, their episode could not be restored,
        or their worker was replaced."""
        self.hidden_states: InitialHiddenStates | None = None
        """Hidden states of a recurrent policy before the first tick."""
        if self.infos is not None:
            self.infos = []

    def carried(self, sums: np.ndarray) -> np.ndarray:
        """Return sums of the running episodes, `[n_envs, ...]`: 0 where the previous rollout is not continued.

        :param sums: Sums at the end of the previous rollout; of another number of environments before the first one.
        """
        if len(sums) != self.n_envs:
            return np.zeros((self.n_envs, *sums.shape[1:]))
        sums[self.renewed] = 0.0
        return sums

    def finish(self, last_actor_ids: list[ActorID], actors: Sequence[ActorID | None]) -> None:
        """Complete the rollout after its last tick.

        :param last_actor_ids: The next actors, by environment.
        :param actors: Per tick the actor of all environments, None where they differed; as many as ticks were taken.
        """
        self._show_ticks(len(actors))
        for name in ("actor_rewards", "actor_done"):
            if (array := getattr(self, name)) is not None:
                setattr(self, name, array[: self.n_ticks])
        length = int(self.step_complete.all(axis=1).argmax()) + 1  # of the first environment step
        sequence: list[Any] = list(actors[:length])
        completes = np.arange(1, self.n_ticks + 1)[:, np.newaxis] % length == 0
        is_dense = None not in sequence and sequence * (self.n_ticks // length) == list(actors)
        is_dense = is_dense and bool((self.step_complete == completes).all())
        self.actor_sequence = sequence if is_dense else None
        for columns in self.substeps.values():
            columns.finish(is_dense)
        self.last_actor_ids = last_actor_ids

    def is_dense(self) -> bool:
        """Return whether in all environments the same actors act in the same fixed order."""
        return self.actor_sequence is not None

    def arrays(self) -> dict[str, Any]:
        """Return copies of all arrays, nested by sub-step key: a form that files hold without pickled objects."""
        flags = ("rewards", "terminated", "truncated", "step_complete")
        rows = ("observations", "actions", "agent_ids", "ticks")
        substeps = {key: {name: getattr(part, name) for name in rows} for key, part in self.substeps.items()}
        return copy.deepcopy({"substeps": substeps, **{name: getattr(self, name) for name in flags}})

    def check_finite(self, seeding_at: Callable[[int, int], Seeding | None], constrained: Sequence[Any] = ()) -> None:
        """Refuse numbers that are NaN or infinite.

        :param seeding_at: Returns the seeding of an environment; arguments: index of the environment, number of ticks
            to the end of the rollout.
        :param constrained: Names of the statistics in :attr:`constrained`.
        :raises NonFiniteError: Names the first one, its environment and seed, step, sub-step and key.
        """
        for tick, env_index, name, value in self._non_finite_numbers(constrained):
            seeding = seeding_at(env_index, self.n_ticks - tick)
            at = f"tick {tick} of {self.n_ticks}" if tick < self.n_ticks else "the end"
            step = int(self.step_complete[:tick, env_index].sum())
            seeded = "" if seeding is None else f", {seeding}"
            raise NonFiniteError(
                f"environment {env_index}, {at} of the rollout (its environment step {step}{seeded}): {name} is "
                f"{value}. Training stops before any parameter changes. Check what the environment and its wrappers "
                "compute there."
            )

    def _non_finite_numbers(self, constrained: Sequence[Any]) -> Iterator[tuple[int, int, str, Any]]:
        """Yield tick, environment, name and value of numbers that are NaN or infinite."""
        values: Any = self.constrained
        of_statistics = [
            (f"`{statistic}` of `algorithm.constraints`", values[..., index])
            for index, statistic in enumerate(constrained)
        ]
        for name, array in [("reward", self.rewards), ("actor reward", self.actor_rewards), *of_statistics]:
            for tick, env_index, *_ in _non_finite_places(array):
                yield tick, env_index, name, array[tick, env_index]
        for step_key, columns in self.substeps.items():
            for kind, arrays in (("observation", columns.observations), ("logits of action", columns.logits or {})):
                for key, array in arrays.items():
                    for row, env_index, *rest in _non_finite_places(array):
                        if self._is_used(columns, row, env_index):
                            tick = int(columns.ticks[row]) if row < columns.n_rows else self.n_ticks
                            name = f"{kind} `{key}` (sub-step {step_key!r}, index {rest})"
                            yield tick, env_index, name, array[row, env_index][tuple(rest)]
        for entry in self.final_observations:
            for key, value in entry.observation.items():
                for place in _non_finite_places(value):
                    name = f"final observation `{key}` (sub-step {entry.actor_id.step_key!r})"
                    yield entry.tick, entry.env_index, name, value[tuple(place)]

    def _is_used(self, columns: SubstepColumns, row: int, env_index: int) -> bool:
        if row < columns.n_rows:
            return columns.valid is None or bool(columns.valid[row, env_index])
        return self.last_actor_ids[env_index].step_key == columns.step_key


def substeps_per_step(agent_counts_dict: Mapping[StepKeyType, int]) -> int:
    """Return sub-steps of an environment step in which each agent acts once; 1 where numbers of agents vary (-1).

    It is the initial capacity for each step. Steps of hierarchies have fewer sub-steps, steps with more agents more.
    """
    counts = list(agent_counts_dict.values())
    return sum(counts) if all(count > 0 for count in counts) else 1


def has_known_reward(step_complete: np.ndarray) -> np.ndarray:
    """Return where per-actor rewards are known: in completed environment steps, not in one that is incomplete.

    :param step_complete: `[n_ticks, n_envs]`, the tick completed an environment step.
    """
    return np.asarray(np.logical_or.accumulate(step_complete[::-1], axis=0)[::-1])


def _non_finite_places(array: np.ndarray | None) -> list[list[int]]:
    """Return the indices of the numbers that are NaN or infinite."""
    if array is None or array.dtype.kind != "f" or np.isfinite(array).all():
        return []
    places: list[list[int]] = np.argwhere(~np.isfinite(array)).tolist()
    return places


class SubstepColumns:
    """Observations and actions of the actors with one sub-step key.

    :param step_key: The sub-step key.
    :param capacity: Maximum number of rows.
    :param n_envs: Number of environments.
    :param observation_space: Observation space of the sub-step.
    :param action_space: Action space of the sub-step.
    :param logits_shapes: Shapes of the logits by action key; None: logits are not recorded.
    """

    def __init__(
        self,
        step_key: StepKeyType,
        capacity: int,
        n_envs: int,
        observation_space: spaces.Dict,
        action_space: spaces.Dict,
        logits_shapes: Mapping[str, Sequence[int]] | None,
    ) -> None:
        self.step_key = step_key
        self.n_rows = 0
        """Rows filled."""
        leading = capacity + 1, n_envs  # the last row is the observation after the rollout
        self._all: dict[str, Row] = {
            "observations": zeros({step_key: observation_space}, leading, "observation")[step_key],
            "actions": zeros({step_key: action_space}, leading, "action")[step_key],
            "logits": {key: np.zeros((*leading, *shape), np.float32) for key, shape in (logits_shapes or {}).items()},
        }
        self._rows = {
            "agent_ids": np.zeros(leading, np.int64),
            "ticks": np.zeros(capacity + 1, np.int64),
            "valid": np.zeros(leading, np.bool_),
        }
        self._make_row_views()
        self.observations: Row
        """`[n_rows + 1, n_envs, ...]`; the last row is the observation after the rollout."""
        self.actions: Row
        """`[n_rows, n_envs, ...]`"""
        self.logits: Row | None
        """`[n_rows, n_envs, ...]`; None if they are not recorded."""
        self.agent_ids: np.ndarray
        """int64 `[n_rows, n_envs]`"""
        self.ticks: np.ndarray
        """int64 `[n_rows]`: the tick that each row belongs to."""
        self.valid: np.ndarray | None
        """bool `[n_rows, n_envs]`; None if every entry is valid."""
        self.finish(is_dense=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the filled rows."""
        kept = ("step_key", "n_rows", "observations", "actions", "logits", "agent_ids", "ticks", "valid")
        return {name: getattr(self, name) for name in kept}

    def _make_row_views(self) -> None:
        """Make the views once, so that filling the columns makes no arrays."""
        n_rows = len(self._rows["ticks"])
        self.observation_rows, self.action_rows, logits_rows = (
            [{key: array[row] for key, array in arrays.items()} for row in range(n_rows)]
            for arrays in self._all.values()
        )
        self.logits_rows = [row or None for row in logits_rows]

    def reserve(self, capacity: int) -> None:
        """Increase the capacity; filled rows stay.

        :param capacity: New maximum number of rows.
        """
        for arrays in (*self._all.values(), self._rows):
            arrays.update({key: _lengthened(array, capacity + 1) for key, array in arrays.items()})
        self._make_row_views()

    def add_row(self, tick: int, env_indices: Sequence[int] | None, agent_ids: Sequence[int]) -> int:
        """Add the next row; its observations are already written.

        :param tick: The tick it belongs to.
        :param env_indices: Environments at this sub-step; None: all.
        :param agent_ids: The agents acting in them.
        :return: Index of the row.
        """
        row = self.n_rows
        self.n_rows += 1
        envs: Any = slice(None) if env_indices is None else env_indices
        self._rows["ticks"][row] = tick
        self._rows["valid"][row] = env_indices is None
        self._rows["valid"][row, envs] = True
        self._rows["agent_ids"][row, envs] = agent_ids
        return row

    def fill_rows(self, n_rows: int, agent_id: int, left_out: Mapping[int, np.ndarray]) -> None:
        """Set the rows of one agent that acts at every tick.

        :param n_rows: Number of rows.
        :param agent_id: The agent.
        :param left_out: Indices of the environments in which it did not act, by row.
        """
        self.n_rows = n_rows
        self._rows["ticks"][:n_rows] = np.arange(n_rows)
        self._rows["agent_ids"][:n_rows] = agent_id
        self._rows["valid"][:n_rows] = True
        for row, envs in left_out.items():
            self._rows["valid"][row, envs] = False

    def finish(self, is_dense: bool) -> None:
        """Set the public arrays to the filled rows.

        :param is_dense: Whether every entry is valid.
        """
        n_rows = self.n_rows
        self.observations = {key: array[: n_rows + 1] for key, array in self._all["observations"].items()}
        self.actions = {key: array[:n_rows] for key, array in self._all["actions"].items()}
        self.logits = {key: array[:n_rows] for key, array in self._all["logits"].items()} or None
        self.agent_ids, self.ticks, valid = (array[:n_rows] for array in self._rows.values())
        self.valid = None if is_dense else valid

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Return row and environment index of all valid entries in time order: `arrays[key][rows, env_indices]`."""
        valid = np.ones_like(self.agent_ids, np.bool_) if self.valid is None else self.valid
        rows, env_indices = np.nonzero(valid)
        return rows, env_indices

    def entries_by_actor(self, are_separate: bool = True) -> Iterator[tuple[ActorID, tuple[np.ndarray, np.ndarray]]]:
        """Return the entries of each actor that acted.

        :param are_separate: Whether agents are distinguished; otherwise the first one represents all.
        :return: Each actor with its rows and environments, both `[n_entries]`.
        """
        rows, env_indices = self.entries()
        agents = self.agent_ids[rows, env_indices]
        if not are_separate and len(agents):
            yield ActorID(self.step_key, int(agents[0])), (rows, env_indices)
            return
        for agent in np.unique(agents):
            chosen = agents == agent
            yield ActorID(self.step_key, int(agent)), (rows[chosen], env_indices[chosen])


def _lengthened(array: np.ndarray, n_rows: int) -> np.ndarray:
    """Return the array, extended by rows of zeros: `[n_rows, ...]`."""
    longer = np.zeros((n_rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
