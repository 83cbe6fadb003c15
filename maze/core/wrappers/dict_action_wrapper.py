"""Dictionary actions for gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.wrappers.wrapper import ActionWrapper


class DictActionWrapper(ActionWrapper[gymnasium.Env[Any, Any]]):
    """Turns a single action space into `{"action": ...}` and a Tuple into `{"action_0": ..., ...}`.

    A Dict stays as it is. Works around gymnasium environments, whose five-value steps are passed through.

    :param env: The environment to wrap.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.action_space
        self._is_dict = isinstance(space, spaces.Dict)
        self._is_tuple = isinstance(space, spaces.Tuple)
        if isinstance(space, spaces.Dict):
            self._action_space = space
        elif isinstance(space, spaces.Tuple):
            self._action_space = spaces.Dict({f"action_{i}": entry for i, entry in enumerate(space.spaces)})
        else:
            self._action_space = spaces.Dict({"action": space})

    @property
    def action_space(self) -> spaces.Dict:
        """The dictionary space."""
        return self._action_space

    @override(ActionWrapper)
    def action(self, action: dict[str, np.ndarray]) -> Any:
        if self._is_dict:
            return action
        if self._is_tuple:
            return tuple(action[f"action_{i}"] for i in range(len(self._action_space.spaces)))
        return action["action"]

    @override(ActionWrapper)
    def reverse_action(self, action: Any) -> dict[str, np.ndarray]:
        if self._is_dict:
            return dict(action)
        return {f"action_{i}": part for i, part in enumerate(action)} if self._is_tuple else {"action": action}
