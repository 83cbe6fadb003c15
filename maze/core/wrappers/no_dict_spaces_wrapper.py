"""Conversion between dictionary spaces and single spaces, and dictionary spaces in alphabetical order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.space_values import entries_of, packed, parts_of
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.wrappers.wrapper import ActionWrapper, ObservationWrapper, SpacesWrapper


class DictActionWrapper(ActionWrapper[gymnasium.Env[Any, Any]]):
    """Turn a single action space into `{"action": ...}` and a Tuple into `{"action_0": ..., ...}`.

    A Dict stays as it is. Wraps gymnasium environments, whose five-value steps are passed through.

    :param env: The environment to wrap.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._kind, entries = entries_of(env.action_space, "action")
        self.action_space = env.action_space if isinstance(env.action_space, spaces.Dict) else spaces.Dict(entries)
        """The dictionary space."""

    @override(ActionWrapper)
    def action(self, action: dict[str, np.ndarray]) -> Any:
        return packed(self._kind, {key: action[key] for key in self.action_space})

    @override(ActionWrapper)
    def reverse_action(self, action: Any) -> dict[str, np.ndarray]:
        return dict(parts_of(self._kind, self.action_space, action))


class DictObservationWrapper(ObservationWrapper[gymnasium.Env[Any, Any]]):
    """Turn a single observation space into `{"observation": ...}` and a Tuple into `{"observation_0": ..., ...}`.

    A Dict stays as it is. Wraps gymnasium environments, whose five-value steps are passed through.

    :param env: The environment to wrap.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        given = env.observation_space
        self._kind, entries = entries_of(given, "observation")
        self.observation_space = given if isinstance(given, spaces.Dict) else spaces.Dict(entries)
        """The dictionary space."""

    @override(ObservationWrapper)
    def observation(self, observation: Any) -> Any:
        return dict(parts_of(self._kind, self.observation_space, observation))


class NoDictActionWrapper(ActionWrapper[Any], SpacesWrapper[Any]):
    """Replace dictionary action spaces by their only entry.

    :param env: The environment to wrap; each sub-step's action space has one entry.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        entries = _only_entries(env.action_spaces_dict, "action")
        self._keys = {step_key: key for step_key, (key, _) in entries.items()}
        self._only_key = next(iter(self._keys.values())) if len(self._keys) == 1 else None
        self.action_spaces_dict = {step_key: entry for step_key, (_, entry) in entries.items()}
        """The only entry of each sub-step's action space."""

    @override(ActionWrapper)
    def action(self, action: np.ndarray) -> dict[str, np.ndarray]:
        return {self._only_key if self._only_key is not None else self._keys[self.env.actor_id().step_key]: action}

    @override(ActionWrapper)
    def reverse_action(self, action: dict[str, np.ndarray]) -> np.ndarray:
        (only_action,) = action.values()
        return only_action


class NoDictObservationWrapper(ObservationWrapper[Any], SpacesWrapper[Any]):
    """Replace dictionary observation spaces by their only entry.

    :param env: The environment to wrap; each sub-step's observation space has one entry.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        entries = _only_entries(env.observation_spaces_dict, "observation")
        self.observation_spaces_dict = {step_key: entry for step_key, (_, entry) in entries.items()}
        """The only entry of each sub-step's observation space."""

    @override(ObservationWrapper)
    def observation(self, observation: Any) -> Any:
        (only_observation,) = observation.values()
        return only_observation


class NoDictSpacesWrapper(NoDictActionWrapper):
    """Replace dictionary spaces, of actions and observations, by their only entry.

    For frameworks without dictionary spaces. It is a :class:`NoDictActionWrapper` around a
    :class:`NoDictObservationWrapper`.

    :param env: The environment to wrap; each of its spaces has one entry.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(NoDictObservationWrapper(env))


def _only_entries(
    spaces_dict: Mapping[StepKeyType, Any], what: str
) -> dict[StepKeyType, tuple[str, spaces.Space[Any]]]:
    """Return key and space of the only entry of each sub-step's dictionary space.

    :raises EnvironmentContractError: A space is not a dictionary with one entry.
    """
    entries = {}
    for step_key, space in spaces_dict.items():
        if not isinstance(space, spaces.Dict) or len(space.spaces) != 1:
            raise EnvironmentContractError(
                f"The {what} space must have one entry, found {space}. GymMazeEnv(..., action_mask=False) has no mask."
            )
        (entries[step_key],) = space.spaces.items()
    return entries


class SortedSpacesWrapper(SpacesWrapper[Any]):
    """Sort the entries of all dictionary spaces by name, for components that depend on their order.

    :param env: The environment to wrap.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.action_spaces_dict, self.observation_spaces_dict = (
            {key: spaces.Dict(dict(sorted(space.spaces.items()))) for key, space in spaces_dict.items()}
            for spaces_dict in (env.action_spaces_dict, env.observation_spaces_dict)
        )
        """The same entries, random generators included, in alphabetical order."""
