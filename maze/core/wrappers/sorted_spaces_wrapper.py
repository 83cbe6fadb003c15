"""Spaces in alphabetical order."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Union

from gymnasium import spaces

from maze.core.env.structured_env import StepKeyType
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.wrappers.wrapper import EnvType, Wrapper


class SortedSpacesWrapper(Wrapper[Union[EnvType, StructuredEnvSpacesMixin]]):
    """Sorts the entries of all dictionary spaces by name, for components that go by their order.

    :param env: The environment to wrap.
    """

    keeps_observations_and_actions = True

    @property
    def action_space(self) -> spaces.Dict:
        """Action space of the actor that acts next."""
        env: Any = self.env
        return _sorted(env.action_space)

    @property
    def observation_space(self) -> spaces.Dict:
        """Observation space of the actor that acts next."""
        env: Any = self.env
        return _sorted(env.observation_space)

    @property
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        """Action space of each sub-step."""
        env: Any = self.env
        return {key: _sorted(space) for key, space in env.action_spaces_dict.items()}

    @property
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        """Observation space of each sub-step."""
        env: Any = self.env
        return {key: _sorted(space) for key, space in env.observation_spaces_dict.items()}


def _sorted(space: spaces.Dict) -> spaces.Dict:
    """The same entries, random generators included, in another order."""
    return spaces.Dict(OrderedDict(sorted(space.spaces.items())))
