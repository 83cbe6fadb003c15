"""What the actors with one sub-step key saw and did in a rollout, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from gymnasium import spaces

from maze.core.env.space_arrays import dict_specs
from maze.core.env.structured_env import ActorID, StepKeyType

Row = dict[str, np.ndarray]


class SubstepColumns:
    """What the actors with one sub-step key saw and did.

    :param step_key: The sub-step key.
    :param capacity: Most rows that can be filled.
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
        *,
        logits_shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self.step_key = step_key
        self.capacity = capacity
        self.n_rows = 0
        """Rows filled."""
        self.observation_rows: list[Row] = []
        self.action_rows: list[Row] = []
        self.logits_rows: list[Row | None] = []
        self._all_observations = _allocate(observation_space, (capacity + 1, n_envs))
        self._all_actions = _allocate(action_space, (capacity, n_envs))
        self._all_logits: Row | None = None
        if logits_shapes is not None:
            self._all_logits = {
                key: np.zeros((capacity, n_envs, *shape), np.float32) for key, shape in logits_shapes.items()
            }
        self.masks = _masks(observation_space, action_space)
        """Observations that are action masks, with the index at which each choice begins in them."""
        self._all_agent_ids = np.zeros((capacity, n_envs), np.int64)
        self._all_ticks = np.arange(capacity, dtype=np.int64)
        self._all_valid = np.ones((capacity, n_envs), np.bool_)

        self._make_row_views()

        self.observations = self._all_observations
        """`[n_rows + 1, n_envs, ...]`; the last row is what is seen after the rollout."""
        self.actions = self._all_actions
        """`[n_rows, n_envs, ...]`"""
        self.logits = self._all_logits
        """`[n_rows, n_envs, ...]`; None if they are not recorded."""
        self.agent_ids = self._all_agent_ids
        """int64 `[n_rows, n_envs]`"""
        self.ticks = self._all_ticks
        """int64 `[n_rows]`: the tick that each row belongs to."""
        self.valid: np.ndarray | None = None
        """bool `[n_rows, n_envs]`; None if every entry is valid."""

    def _make_row_views(self) -> None:
        """Made once: filling the columns makes no arrays."""
        self.observation_rows = _rows(self._all_observations, self.capacity + 1)
        self.action_rows = _rows(self._all_actions, self.capacity)
        self.logits_rows = [None] * self.capacity
        if self._all_logits is not None:
            self.logits_rows = list(_rows(self._all_logits, self.capacity))

    def reserve(self, capacity: int) -> None:
        """Makes room for more rows; those that were filled stay.

        :param capacity: Most rows that can be filled from now on.
        """
        self.capacity = capacity
        for arrays, n_rows in ((self._all_observations, capacity + 1), (self._all_actions, capacity)):
            arrays.update({key: lengthened(array, n_rows) for key, array in arrays.items()})
        if self._all_logits is not None:
            self._all_logits = {key: lengthened(array, capacity) for key, array in self._all_logits.items()}
        self._all_agent_ids = lengthened(self._all_agent_ids, capacity)
        self._all_ticks = np.append(self._all_ticks, np.arange(len(self._all_ticks), capacity))
        self._all_valid = lengthened(self._all_valid, capacity)
        self._make_row_views()

    def add_row(self, tick: int, env_indices: Sequence[int] | None, agent_ids: Sequence[int]) -> int:
        """Takes the next row, whose observations are already written.

        :param tick: The tick it belongs to.
        :param env_indices: Environments that stand at this sub-step; None: all.
        :param agent_ids: The agents acting in them.
        :return: Index of the row.
        """
        row = self.n_rows
        self.n_rows += 1
        self._all_ticks[row] = tick
        if env_indices is None:
            self._all_valid[row] = True
            self._all_agent_ids[row] = agent_ids
        else:
            self._all_valid[row] = False
            self._all_valid[row, env_indices] = True
            self._all_agent_ids[row, env_indices] = agent_ids
        return row

    def leave_out(self, where: Mapping[int, np.ndarray], agent_id: int) -> None:
        """In rows that were filled with the decisions of one agent, some environments made none.

        :param where: Indices of the environments by row.
        :param agent_id: The agent.
        """
        self._all_agent_ids[: self.n_rows] = agent_id
        self._all_valid[: self.n_rows] = True
        for row, envs in where.items():
            self._all_valid[row, envs] = False

    def finish(self, is_dense: bool) -> None:
        """Shows the rows that were filled.

        :param is_dense: Whether every entry is valid.
        """
        n_rows = self.n_rows
        self.observations = _head(self._all_observations, n_rows + 1, self.capacity + 1)
        self.actions = _head(self._all_actions, n_rows, self.capacity)
        self.logits = None if self._all_logits is None else _head(self._all_logits, n_rows, self.capacity)
        self.agent_ids = self._all_agent_ids[:n_rows]
        self.ticks = self._all_ticks[:n_rows]
        self.valid = None if is_dense else self._all_valid[:n_rows]

    def entries(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and environment index of all valid entries, in the order of time: `arrays[key][rows, env_indices]`."""
        n_envs = self.agent_ids.shape[1]
        valid = self.valid if self.valid is not None else np.ones((self.n_rows, n_envs), np.bool_)
        rows, env_indices = np.nonzero(valid)
        return rows, env_indices

    def entries_by_actor(self, are_separate: bool = True) -> Iterator[tuple[ActorID, tuple[np.ndarray, np.ndarray]]]:
        """The entries of each actor that acted.

        :param are_separate: Whether agents are told apart; otherwise the first one stands for all.
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


def _masks(observation_space: spaces.Dict, action_space: spaces.Dict) -> dict[str, list[int]]:
    """Action masks by their names: `<head>_mask`, or `action_mask` if there is one head."""
    masks = {}
    for head, space in action_space.spaces.items():
        sizes = [int(n) for n in np.ravel(getattr(space, "nvec", getattr(space, "n", 0)))]
        is_choice = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
        for name in (f"{head}_mask", *(["action_mask"] if len(action_space.spaces) == 1 else [])):
            mask = observation_space.spaces.get(name)
            if is_choice and mask is not None and mask.shape == (sum(sizes),):
                masks[name] = np.cumsum([0, *sizes[:-1]]).tolist()
    return masks


def _allocate(space: spaces.Dict, leading: tuple[int, int]) -> Row:
    return {key: np.zeros((*leading, *shape), dtype) for key, (shape, dtype) in dict_specs(space).items()}


def _rows(arrays: Row, n_rows: int) -> list[Row]:
    return [{key: array[row] for key, array in arrays.items()} for row in range(n_rows)]


def _head(arrays: Row, n_rows: int, capacity: int) -> Row:
    return arrays if n_rows == capacity else {key: array[:n_rows] for key, array in arrays.items()}


def lengthened(array: np.ndarray, n_rows: int) -> np.ndarray:
    """The array with zeros behind its rows.

    :return: `[n_rows, ...]`.
    """
    longer = np.zeros((n_rows, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
