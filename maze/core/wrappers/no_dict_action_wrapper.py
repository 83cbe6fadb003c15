"""Actions without a dictionary around them."""

from __future__ import annotations

from typing import Any, Union

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.structured_env import StepKeyType
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.errors import EnvironmentContractError
from maze.core.wrappers.wrapper import ActionWrapper, EnvType


class NoDictActionWrapper(ActionWrapper[Union[EnvType, StructuredEnvSpacesMixin]]):
    """Replaces dictionary action spaces by the only entry that they have.

    :param env: The environment to wrap; each sub-step's action space has one entry.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._keys = {step_key: only_entry(space, "action") for step_key, space in env.action_spaces_dict.items()}
        self._only_key = next(iter(self._keys.values())) if len(self._keys) == 1 else None

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The only entry of the action space of the actor that acts next."""
        env: Any = self.env
        space: spaces.Space[Any] = env.action_space[only_entry(env.action_space, "action")]
        return space

    @property
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Space[Any]]:
        """The only entry of each sub-step's action space."""
        env: Any = self.env
        return {step_key: space[self._keys[step_key]] for step_key, space in env.action_spaces_dict.items()}

    @override(ActionWrapper)
    def action(self, action: np.ndarray) -> dict[str, np.ndarray]:
        env: Any = self.env
        return {self._only_key if self._only_key is not None else self._keys[env.actor_id().step_key]: action}

    @override(ActionWrapper)
    def reverse_action(self, action: dict[str, np.ndarray]) -> np.ndarray:
        (only_action,) = action.values()
        return only_action


def only_entry(space: Any, what: str) -> str:
    """The key of a dictionary space's only entry.

    :raises EnvironmentContractError: The space is no dictionary with one entry.
    """
    if not isinstance(space, spaces.Dict) or len(space.spaces) != 1:
        raise EnvironmentContractError(
            f"The {what} space must be a dictionary space with one entry to be replaced by it, but is {space}. "
            "GymMazeEnv(..., action_mask=False) leaves out the mask of a gymnasium environment."
        )
    return str(next(iter(space.spaces)))
