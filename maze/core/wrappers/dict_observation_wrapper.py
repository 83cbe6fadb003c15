"""Dictionary observations for gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.wrappers.wrapper import ObservationWrapper


class DictObservationWrapper(ObservationWrapper[gymnasium.Env[Any, Any]]):
    """Turns a single observation space into `{"observation": ...}` and a Tuple into `{"observation_0": ..., ...}`.

    A Dict stays as it is. Works around gymnasium environments, whose five-value steps are passed through.

    :param env: The environment to wrap.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        self._is_dict = isinstance(space, spaces.Dict)
        self._is_tuple = isinstance(space, spaces.Tuple)
        if isinstance(space, spaces.Dict):
            self._observation_space = space
        elif isinstance(space, spaces.Tuple):
            self._observation_space = spaces.Dict({f"observation_{i}": entry for i, entry in enumerate(space.spaces)})
        else:
            self._observation_space = spaces.Dict({"observation": space})

    @property
    def observation_space(self) -> spaces.Dict:
        """The dictionary space."""
        return self._observation_space

    @override(ObservationWrapper)
    def observation(self, observation: Any) -> Any:
        if self._is_dict:
            return observation
        if self._is_tuple:
            return {f"observation_{i}": part for i, part in enumerate(observation)}
        return {"observation": observation}
