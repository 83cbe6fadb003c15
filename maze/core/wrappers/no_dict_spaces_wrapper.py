"""Actions and observations without dictionaries around them."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces

from maze.core.env.structured_env import StepKeyType
from maze.core.wrappers.no_dict_action_wrapper import NoDictActionWrapper
from maze.core.wrappers.no_dict_observation_wrapper import NoDictObservationWrapper
from maze.core.wrappers.wrapper import EnvType


class NoDictSpacesWrapper(NoDictActionWrapper[EnvType]):
    """Replaces dictionary spaces, of actions and observations, by the only entry that they have.

    For frameworks that know no dictionaries. It is a :class:`NoDictActionWrapper` around a
    :class:`NoDictObservationWrapper`.

    :param env: The environment to wrap; each of its spaces has one entry.
    """

    def __init__(self, env: Any) -> None:
        self._observations: NoDictObservationWrapper[Any] = NoDictObservationWrapper(env)
        super().__init__(self._observations)

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The only entry of the observation space of the actor that acts next."""
        return self._observations.observation_space

    @property
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Space[Any]]:
        """The only entry of each sub-step's observation space."""
        return self._observations.observation_spaces_dict

    def observation(self, observation: Any) -> Any:
        """Takes an observation out of its dictionary."""
        return self._observations.observation(observation)
