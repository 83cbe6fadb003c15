"""An environment whose observation and action are mixtures of spaces; importing it registers `Mixture-v0`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

WORDS = ("left", "right", "up", "down")


class MixtureEnv(gymnasium.Env[Any, Any]):
    """Ten steps; in each a text says one half of the action, a number the other.

    The reward is 0.5 for each half: a policy that cannot read reaches 6.25, one that can 10.
    """

    observation_space = spaces.Dict(
        order=spaces.Text(5, charset="abcdefghijklmnopqrstuvwxyz"),
        scene=spaces.Tuple([spaces.Discrete(3, start=1), spaces.Box(-np.inf, np.inf, (2,), np.float64)]),
        things=spaces.Sequence(spaces.Box(0.0, 1.0, (2,), np.float32)),
    )
    action_space = spaces.Tuple([spaces.Discrete(len(WORDS)), spaces.Discrete(3, start=1)])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first of ten orders."""
        super().reset(seed=seed)
        self._steps = 0
        return self._shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Half a point for the word, half for the number."""
        reward = 0.5 * (int(action[0]) == self._word) + 0.5 * (int(action[1]) == self._number)
        self._steps += 1
        return self._shown(), reward, self._steps == 10, False, {}

    def _shown(self) -> dict[str, Any]:
        self._word = int(self.np_random.integers(len(WORDS)))
        self._number = 1 + int(self.np_random.integers(3))
        things = tuple(self.np_random.random(2, np.float32) for _ in range(self.np_random.integers(1, 4)))
        return {"order": WORDS[self._word], "scene": (self._number, self.np_random.normal(size=2)), "things": things}


gymnasium.register("Mixture-v0", MixtureEnv)
