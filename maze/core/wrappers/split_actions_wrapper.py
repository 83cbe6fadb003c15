"""Splitting of vector actions into separate ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigValueError, EnvironmentContractError
from maze.core.wrappers.wrapper import Action, ActionWrapper, SubstepActionWrapper, checked_entry, known_spaces


class _Split(NamedTuple):
    """Composition of one action."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    indices: dict[str, Any]
    """By name of the part its indices in the vector; a single integer where the part is a number."""


class SplitActionsWrapper(SubstepActionWrapper):
    """Split vector actions into separate ones, each with a distribution of its own.

    Works for one-dimensional Box, MultiDiscrete and MultiBinary spaces. Parts of a Box are boxes, of MultiBinary are
    MultiBinary, of MultiDiscrete are Discrete where they have one index, and MultiDiscrete otherwise.

    >>> from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
    >>> env = SplitActionsWrapper(
    ...     GymMazeEnv("BipedalWalker-v3"),
    ...     split_config={"action": {"left": {"indices": [0, 1]}, "right": {"indices": [2, 3]}}},
    ... )
    >>> list(env.action_space)
    ['left', 'right']

    :param env: The environment to wrap.
    :param split_config: By name of the action, by name of its parts: `indices` in the vector. The parts have all of
        the vector's indices, each once.
    :raises ConfigError: The configuration names an unknown action, one that cannot be split, or a name twice.
    """

    def __init__(self, env: MazeEnv[Any], split_config: dict[str, dict[str, dict[str, Any]]]) -> None:
        super().__init__(env)
        step_spaces = {key: dict(space.spaces) for key, space in env.action_spaces_dict.items()}
        self.splits: dict[str, _Split] = {}
        """The parts of each split action."""
        for name, parts in split_config.items():
            self.splits[name] = split = self._split_of(name, parts)
            for entries in step_spaces.values():
                if name not in entries:
                    continue
                space = entries.pop(name)
                clash = [part for part in split.indices if part in entries]
                if clash:
                    raise ConfigValueError(f"split_config.{name}: there are other actions called {clash}.")
                entries.update({part: _part_space(space, indices) for part, indices in split.indices.items()})
        self.action_spaces_dict = {key: spaces.Dict(entries) for key, entries in step_spaces.items()}

    @override(ActionWrapper)
    def action(self, action: Action) -> Action:
        joined = dict(action)
        for name, (shape, dtype, indices) in self.splits.items():
            if indices.keys().isdisjoint(action):
                continue  # of another sub-step
            if not indices.keys() <= action.keys():
                raise EnvironmentContractError(
                    f"SplitActionsWrapper: `{name}` is made of {list(indices)}, but the action has {list(action)}."
                )
            vector = np.empty(shape, dtype)
            for part, index in indices.items():
                vector[index] = joined.pop(part)
            joined[name] = vector
        return joined

    @override(ActionWrapper)
    def reverse_action(self, action: Action) -> Action:
        parts = dict(action)
        for name, split in self.splits.items():
            if name in parts:
                vector = np.asarray(parts.pop(name))
                parts.update({part: vector[index] for part, index in split.indices.items()})
        return parts

    def _split_of(self, name: str, parts: Any) -> _Split:
        where = f"split_config.{name}"
        step_spaces = list(known_spaces(self.env.action_spaces_dict, name, where, "action").values())
        space = step_spaces[0]
        if not isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)) or len(space.shape) != 1:
            raise ConfigValueError(
                f"{where}: only one-dimensional Box, MultiDiscrete and MultiBinary actions can be split, found {space}."
            )
        if any(other.shape != space.shape or other.dtype != space.dtype for other in step_spaces):
            raise ConfigValueError(f"{where}: expected the same shape and type in all sub-steps, found {step_spaces}.")
        indices = {
            str(part): [int(index) for index in checked_entry(entry, f"{where}.{part}", ("indices",))["indices"]]
            for part, entry in parts.items()
        }
        used = sorted(index for part in indices.values() for index in part)
        if used != list(range(space.shape[0])):
            raise ConfigValueError(
                f"{where}: the parts must have the indices 0 to {space.shape[0] - 1}, each once; found {used}."
            )
        is_number = isinstance(space, spaces.MultiDiscrete)
        return _Split(
            space.shape,
            np.dtype(space.dtype),
            {part: index[0] if is_number and len(index) == 1 else index for part, index in indices.items()},
        )


def _part_space(space: spaces.Space[Any], indices: Any) -> spaces.Space[Any]:
    if isinstance(space, spaces.Box):
        return spaces.Box(space.low[indices], space.high[indices], dtype=space.dtype.type)
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(len(indices))
    assert isinstance(space, spaces.MultiDiscrete)
    counts, start = space.nvec[indices], space.start[indices]
    if isinstance(indices, int):
        return spaces.Discrete(int(counts), start=int(start))
    return spaces.MultiDiscrete(counts, start=start)
