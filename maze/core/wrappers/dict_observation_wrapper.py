"""Dictionary observations for gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.wrappers.gym_spaces import entries_of, parts_of
from maze.core.wrappers.wrapper import ObservationWrapper


class DictObservationWrapper(ObservationWrapper[gymnasium.Env[Any, Any]]):
    """Turns a single observation space into `{"observation": ...}` and a Tuple into `{"observation_0": ..., ...}`.

    A Dict stays as it is. Works around gymnasium environments, whose five-value steps are passed through.

    :param env: The environment to wrap.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        shown = env.observation_space
        self._kind, entries = entries_of(shown, "observation")
        self._observation_space = shown if isinstance(shown, spaces.Dict) else spaces.Dict(entries)

    @property
    def observation_space(self) -> spaces.Dict:
        """The dictionary space."""
        return self._observation_space

    @override(ObservationWrapper)
    def observation(self, observation: Any) -> Any:
        return dict(parts_of(self._kind, self._observation_space, observation))
