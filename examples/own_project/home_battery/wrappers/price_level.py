"""Tells the agent whether energy is cheap."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.wrappers.wrapper import ObservationWrapper


class PriceLevelWrapper(ObservationWrapper[Any]):
    """Adds `price_level`: the price on a scale on which -1 is cheap and 1 is dear.

    :param env: A house.
    :param cheap: EUR per kWh that counts as -1.
    :param dear: EUR per kWh that counts as 1.
    """

    def __init__(self, env: Any, cheap: float, dear: float) -> None:
        super().__init__(env)
        self.cheap = cheap
        self.dear = dear

    @property
    def observation_spaces_dict(self) -> dict[Any, spaces.Dict]:
        """Observation space of each sub-step."""
        level = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        return {
            key: spaces.Dict({**space.spaces, "price_level": level})
            for key, space in self.env.observation_spaces_dict.items()
        }

    @property
    def observation_space(self) -> spaces.Dict:
        """There is only one sub-step."""
        return self.observation_spaces_dict[0]

    @override(ObservationWrapper)
    def observation(self, observation: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        level = 2.0 * (observation["market"][:1] - self.cheap) / (self.dear - self.cheap) - 1.0
        return {**observation, "price_level": level.astype(np.float32)}
