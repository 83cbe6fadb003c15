"""Discretisation of continuous actions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigValueError
from maze.core.wrappers.wrapper import Action, ActionWrapper, SubstepActionWrapper, checked_entry, known_spaces


class _Grid(NamedTuple):
    """The values of one discretised action."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    values: list[np.ndarray]
    """By entry of the vector, ascending."""


class DiscretizeActionsWrapper(SubstepActionWrapper):
    """Replace continuous actions by a choice among evenly spaced values.

    A Box action of one number becomes Discrete, of several MultiDiscrete; the name stays.

    >>> from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    >>> env = DiscretizeActionsWrapper(
    ...     GymMazeEnv("Pendulum-v1"), discretization_config={"action": {"num_actions": 5, "low": -1.0, "high": 1.0}}
    ... )
    >>> env.action_space, env.action({"action": 1})
    (Dict('action': Discrete(5)), {'action': array([-0.5], dtype=float32)})

    :param env: The environment to wrap.
    :param discretization_config: By name of the action: `num_actions` (at least two), `low` and `high` (smallest and
        largest value, by default those of the space), each a number or a list with one for each entry.
    :raises ConfigError: The configuration names an unknown action, or one that cannot be discretized.
    """

    def __init__(self, env: MazeEnv[Any], discretization_config: dict[str, dict[str, Any]]) -> None:
        super().__init__(env)
        if not isinstance(discretization_config, Mapping):
            raise ConfigValueError(f"discretization_config: expected a mapping, found {discretization_config!r}.")
        step_spaces = {key: dict(space.spaces) for key, space in env.action_spaces_dict.items()}
        self.grids: dict[str, _Grid] = {}
        """The values of each discretised action."""
        for name, config in discretization_config.items():
            where = f"discretization_config.{name}"
            of_action = list(known_spaces(env.action_spaces_dict, name, where, "action").values())
            if any(space != of_action[0] for space in of_action):
                raise ConfigValueError(f"{where}: expected the same space in all sub-steps, found {of_action}.")
            self.grids[name] = grid = _grid(of_action[0], config, where)
            for entries in step_spaces.values():
                if name in entries:
                    counts = [len(values) for values in grid.values]
                    is_single = len(counts) == 1
                    entries[name] = spaces.Discrete(counts[0]) if is_single else spaces.MultiDiscrete(counts)
        self.action_spaces_dict = {key: spaces.Dict(entries) for key, entries in step_spaces.items()}

    @override(ActionWrapper)
    def action(self, action: Action) -> Action:
        continuous = dict(action)
        for name, (shape, dtype, values) in self.grids.items():
            if name in action:
                choices = np.asarray(action[name]).reshape(-1)
                chosen = [grid[choice] for grid, choice in zip(values, choices, strict=True)]
                continuous[name] = np.array(chosen, dtype).reshape(shape)
        return continuous

    @override(ActionWrapper)
    def reverse_action(self, action: Action) -> Action:
        """Return the nearest choices; inverse of :meth:`action` for values on the grid."""
        discrete = dict(action)
        for name, (_, _, values) in self.grids.items():
            if name in action:
                vector = np.asarray(action[name]).reshape(-1)
                nearest = [np.abs(grid - entry).argmin() for grid, entry in zip(values, vector, strict=True)]
                discrete[name] = np.int64(nearest[0]) if len(values) == 1 else np.array(nearest, dtype=np.int64)
        return discrete


def _grid(space: spaces.Space[Any], config: Any, where: str) -> _Grid:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise ConfigValueError(f"{where}: only continuous Box actions can be discretized, found {space}.")
    checked_entry(config, where, ("num_actions",), ("low", "high"))
    size = int(np.prod(space.shape))
    counts = _per_entry(config["num_actions"], size, f"{where}.num_actions")
    low, high = (
        _per_entry(bound.reshape(-1) if config.get(name) is None else config[name], size, f"{where}.{name}")
        for name, bound in (("low", space.low), ("high", space.high))
    )
    if not (counts == counts.astype(np.int64)).all() or (counts < 2).any():
        raise ConfigValueError(
            f"{where}.num_actions: expected whole numbers of at least 2, found {config['num_actions']!r}."
        )
    is_within = (low.astype(space.dtype) >= space.low.reshape(-1)) & (
        high.astype(space.dtype) <= space.high.reshape(-1)
    )
    if not (np.isfinite([low, high]).all() and (low < high).all() and is_within.all()):
        raise ConfigValueError(
            f"{where}: `low` and `high` must be finite, ascend and lie within the action space {space}, found "
            f"{low.tolist()} and {high.tolist()}. Give them where the action space has no bounds."
        )
    values = [
        np.linspace(first, last, int(count)).astype(space.dtype)
        for first, last, count in zip(low, high, counts, strict=True)
    ]
    return _Grid(space.shape, np.dtype(space.dtype), values)


def _per_entry(value: Any, size: int, where: str) -> np.ndarray:
    """Return one number for each entry of the action."""
    try:
        return np.broadcast_to(np.asarray(value, dtype=np.float64).reshape(-1), (size,))
    except (TypeError, ValueError) as error:
        raise ConfigValueError(
            f"{where}: expected a number, or one for each of the action's {size} entries; found {value!r}."
        ) from error
