"""Bases of wrappers that convert the entries of dictionary spaces, sub-step by sub-step."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import StepKeyType
from maze.core.wrappers.wrapper import ActionWrapper, ObservationsAndActions, ObservationWrapper

_MASK_NAME = re.compile(r"(.*_)?mask(-.*)?")

Observation = dict[str, Any]
Action = dict[str, Any]


def is_mask(name: str) -> bool:
    """Whether an observation is an action mask, by its name: `mask` or `..._mask`, pre-processed or not."""
    return _MASK_NAME.fullmatch(name) is not None


class SubstepObservationWrapper(ObservationWrapper[MazeEnv[Any]], ABC):
    """Base of wrappers whose conversion depends on the sub-step that an observation belongs to.

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
        """Converts an observation of the wrapped environment, which is left as it is.

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
    """Base of wrappers that replace entries of the action spaces.

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
        """Seeds the environment and the spaces of this wrapper, so that their samples repeat as well."""
        self.env.seed(seed)
        if seed is None or isinstance(seed, int):
            for space in self._action_spaces.values():
                space.seed(seed)


def spaces_of_entry(spaces_dict: Mapping[StepKeyType, spaces.Dict], name: str) -> dict[StepKeyType, spaces.Space[Any]]:
    """The spaces of the entries with this name, by the key of the sub-steps that have one."""
    return {key: space.spaces[name] for key, space in spaces_dict.items() if name in space.spaces}


def entry_names(spaces_dict: Mapping[StepKeyType, spaces.Dict]) -> list[str]:
    """The names of all sub-steps' entries, each once."""
    return list(dict.fromkeys(name for space in spaces_dict.values() for name in space.spaces))
