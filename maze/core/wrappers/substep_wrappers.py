"""Base classes of wrappers that convert entries of dictionary spaces by sub-step; checks of their configurations."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigValueError, did_you_mean
from maze.core.wrappers.wrapper import ActionWrapper, ObservationsAndActions, ObservationWrapper

_MASK_NAME = re.compile(r"(.*_)?mask(-.*)?")

Observation = dict[str, Any]
Action = dict[str, Any]


def is_mask(name: str) -> bool:
    """Return whether an observation is an action mask, by its name: `mask` or `..._mask`, pre-processed or not."""
    return _MASK_NAME.fullmatch(name) is not None


class SubstepObservationWrapper(ObservationWrapper[MazeEnv[Any]], ABC):
    """Base class of wrappers whose conversion depends on the sub-step of the observation.

    Subclasses set `_observation_spaces`, the converted spaces by sub-step key.

    :param env: The environment to wrap.
    """

    _observation_spaces: dict[StepKeyType, spaces.Dict]

    def __init__(self, env: MazeEnv[Any]) -> None:
        super().__init__(env)
        step_keys = list(env.observation_spaces_dict)
        self._only_step_key = step_keys[0] if len(step_keys) == 1 else None

    @property
    def observation_space(self) -> spaces.Dict:
        """Observation space of the actor that acts next."""
        return self._observation_spaces[self._next_step_key()]

    @property
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        """Observation space of each sub-step."""
        return self._observation_spaces

    @abstractmethod
    def convert(self, observation: Observation, step_key: StepKeyType) -> Observation:
        """Convert an observation of the wrapped environment, which is not modified.

        :param observation: The observation.
        :param step_key: The sub-step that it belongs to.
        """

    @override(ObservationWrapper)
    def step(self, action: Any) -> tuple[Observation, Any, bool, dict[Any, Any]]:
        observation, reward, done, info = self._env_step(action)
        return self.observation(observation), reward, done, info

    @override(ObservationWrapper)
    def observation(self, observation: Observation) -> Observation:
        step_key = self._only_step_key
        return self.convert(observation, self._next_step_key() if step_key is None else step_key)

    @override(ObservationWrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        observations, actions = self.env.get_observation_and_action_dicts(
            maze_state, maze_action, first_step_in_episode
        )
        if observations is not None:
            observations = {key: self.convert(observation, key) for key, observation in observations.items()}
        return observations, actions

    def _next_step_key(self) -> StepKeyType:
        return self._only_step_key if self._only_step_key is not None else self.env.actor_id().step_key


class SubstepActionWrapper(ActionWrapper[MazeEnv[Any]], ABC):
    """Base class of wrappers that replace entries of the action spaces.

    Subclasses set `_action_spaces`, the spaces of the agent's actions by sub-step key.

    :param env: The environment to wrap.
    """

    _action_spaces: dict[StepKeyType, spaces.Dict]

    @property
    def action_space(self) -> spaces.Dict:
        """Action space of the actor that acts next."""
        if len(self._action_spaces) == 1:
            return next(iter(self._action_spaces.values()))
        return self._action_spaces[self.env.actor_id().step_key]

    @property
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        """Action space of each sub-step."""
        return self._action_spaces

    def seed(self, seed: Any) -> None:
        """Seed the environment and the action spaces of this wrapper."""
        self.env.seed(seed)
        if seed is None or isinstance(seed, int):
            for space in self._action_spaces.values():
                space.seed(seed)


def known_spaces(
    step_spaces: Mapping[StepKeyType, Mapping[str, spaces.Space[Any]]], name: str, where: str, kind: str
) -> dict[StepKeyType, spaces.Space[Any]]:
    """Return the spaces of the entries with a name, by the key of the sub-steps that have one.

    :param step_spaces: Spaces by sub-step key and name.
    :param name: Name in the configuration.
    :param where: Key of the configuration, for the message.
    :param kind: `observation` or `action`, for the message.
    :raises ConfigError: No sub-step has such an entry.
    """
    # `in` of a space is whether it contains a value.
    found = {key: entries[name] for key, entries in step_spaces.items() if name in tuple(entries)}
    if not found:
        known = entry_names(step_spaces)
        raise ConfigValueError(f"{where}: there is no {kind} `{name}`.{did_you_mean(name, known)} Known: {known}.")
    return found


def entry_names(step_spaces: Mapping[StepKeyType, Mapping[str, spaces.Space[Any]]]) -> list[str]:
    """Return the names of all sub-steps' entries, each once."""
    return list(dict.fromkeys(name for entries in step_spaces.values() for name in entries))


def checked_list(value: Any, name: str) -> Sequence[Any]:
    """Return a list of a wrapper's configuration.

    :param value: The list.
    :param name: Name of the argument.
    :raises ConfigError: It is not a list.
    """
    if not isinstance(value, list | tuple):
        raise ConfigValueError(f"{name}: expected a list of mappings, found {value!r}.")
    return value


def checked_entry(
    entry: Any, where: str, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Return an entry of a wrapper's configuration.

    :param entry: The entry.
    :param where: Key of the configuration.
    :param required: Keys that it must have.
    :param optional: Further keys that it may have.
    :raises ConfigError: It is not a mapping, lacks a key, or has an unknown one.
    """
    known = [*required, *optional]
    if not isinstance(entry, Mapping) or any(key not in entry for key in required):
        expected = f"`{'`, `'.join(required)}`" if required else f"keys among {known}"
        raise ConfigValueError(f"{where}: expected a mapping with {expected}, found {entry!r}.")
    for key in entry:
        if key not in known:
            raise ConfigValueError(f"{where}: unknown key `{key}`.{did_you_mean(key, known)} Known: {known}.")
    return entry
