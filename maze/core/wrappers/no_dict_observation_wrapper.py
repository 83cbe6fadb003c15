"""Observations without a dictionary around them."""

from __future__ import annotations

from typing import Any, Union

from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.wrappers.no_dict_action_wrapper import only_entry
from maze.core.wrappers.wrapper import EnvType, ObservationWrapper


class NoDictObservationWrapper(ObservationWrapper[Union[EnvType, StructuredEnvSpacesMixin]]):
    """Replaces dictionary observation spaces by the only entry that they have.

    :param env: The environment to wrap; each sub-step's observation space has one entry.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        for space in env.observation_spaces_dict.values():
            only_entry(space, "observation")

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The only entry of the observation space of the actor that acts next."""
        env: Any = self.env
        space: spaces.Space[Any] = env.observation_space[only_entry(env.observation_space, "observation")]
        return space

    @property
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Space[Any]]:
        """The only entry of each sub-step's observation space."""
        env: Any = self.env
        return {key: space[only_entry(space, "observation")] for key, space in env.observation_spaces_dict.items()}

    @override(ObservationWrapper)
    def observation(self, observation: Any) -> Any:
        (only_observation,) = observation.values()
        return only_observation
