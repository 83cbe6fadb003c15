"""Actions and observations without dictionaries around them."""

from __future__ import annotations

from typing import Any, Union

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import StepKeyType
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper
from maze.core.wrappers.no_dict_observation_wrapper import NoDictObservationWrapper
from maze.core.wrappers.wrapper import EnvType, ObservationsAndActions, Wrapper


class NoDictSpacesWrapper(Wrapper[Union[EnvType, StructuredEnvSpacesMixin]]):
    """Replaces dictionary spaces, of actions and observations, by the only entry that they have.

    For frameworks that know no dictionaries.

    :param env: The environment to wrap; each of its spaces has one entry.
    """

    def __init__(self, env: Any) -> None:
        self._actions: NoDictActionWrapper[Any] = NoDictActionWrapper(env)
        self._observations: NoDictObservationWrapper[Any] = NoDictObservationWrapper(env)
        super().__init__(env)

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The only entry of the observation space of the actor that acts next."""
        return self._observations.observation_space

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The only entry of the action space of the actor that acts next."""
        return self._actions.action_space

    @property
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Space[Any]]:
        """The only entry of each sub-step's observation space."""
        return self._observations.observation_spaces_dict

    @property
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Space[Any]]:
        """The only entry of each sub-step's action space."""
        return self._actions.action_spaces_dict

    def observation(self, observation: Any) -> Any:
        """Takes an observation out of its dictionary."""
        return self._observations.observation(observation)

    def action(self, action: np.ndarray) -> dict[str, np.ndarray]:
        """Packs the action of the actor that acts next into a dictionary.

        :param action: `[*space.shape]`.
        """
        return self._actions.action(action)

    def reverse_action(self, action: dict[str, np.ndarray]) -> np.ndarray:
        """Takes an action out of its dictionary.

        :return: `[*space.shape]`.
        """
        return self._actions.reverse_action(action)

    @override(Wrapper)
    def reset(self) -> Any:
        return self.observation(self._env_reset())

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        observation, reward, done, info = self._env_step(self.action(action))
        return self.observation(observation), reward, done, info

    @override(Wrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        env: Any = self.env
        observations, actions = env.get_observation_and_action_dicts(maze_state, maze_action, first_step_in_episode)
        if observations is not None:
            observations = {key: self.observation(observation) for key, observation in observations.items()}
        if actions is not None:
            actions = {key: self.reverse_action(action) for key, action in actions.items()}
        return observations, actions
