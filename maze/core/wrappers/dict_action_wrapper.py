"""Dictionary actions for gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.wrappers.gym_spaces import entries_of, packed, parts_of
from maze.core.wrappers.wrapper import ActionWrapper


class DictActionWrapper(ActionWrapper[gymnasium.Env[Any, Any]]):
    """Turns a single action space into `{"action": ...}` and a Tuple into `{"action_0": ..., ...}`.

    A Dict stays as it is. Works around gymnasium environments, whose five-value steps are passed through.

    :param env: The environment to wrap.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self._kind, entries = entries_of(env.action_space, "action")
        self._action_space = env.action_space if isinstance(env.action_space, spaces.Dict) else spaces.Dict(entries)

    @property
    def action_space(self) -> spaces.Dict:
        """The dictionary space."""
        return self._action_space

    @override(ActionWrapper)
    def action(self, action: dict[str, np.ndarray]) -> Any:
        return packed(self._kind, {key: action[key] for key in self._action_space})

    @override(ActionWrapper)
    def reverse_action(self, action: Any) -> dict[str, np.ndarray]:
        return dict(parts_of(self._kind, self._action_space, action))
