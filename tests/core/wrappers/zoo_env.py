"""A gymnasium environment with an observation and an action of every kind, and the wrapper stacks of the contract."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.wrappers.dict_action_wrapper import DictActionWrapper
from maze.core.wrappers.dict_observation_wrapper import DictObservationWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv

RED = np.zeros((4, 4, 3), np.uint8)


class ZooEnv(gymnasium.Env):
    """Episodes of random length up to ``length``, ended in the way that ``ends`` says.

    :param length: Greatest number of steps.
    :param ends: ``terminated`` or ``truncated``.
    """

    metadata = {"render_modes": ["rgb_array"]}
    render_mode = "rgb_array"
    action_space = spaces.Dict(
        {"choice": spaces.Discrete(2), "force": spaces.Box(-1, 1, (2,)), "levels": spaces.MultiDiscrete([3, 4])}
    )
    observation_space = spaces.Dict(
        {
            "vector": spaces.Box(-5, 5, (3,)),
            "image": spaces.Box(0, 255, (6, 4, 3), np.uint8),
            "category": spaces.Discrete(4),
            "action_mask": spaces.Box(0, 1, (2,)),
        }
    )

    def __init__(self, length: int = 6, ends: str = "terminated") -> None:
        self.length = length
        self.ends = ends

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(3, self.length + 1))
        self.position = self.np_random.uniform(-1, 1, 3)
        return self._observation(), {}

    def step(self, action: dict[str, Any]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.steps_left -= 1
        self.position[:2] += 0.3 * action["force"]
        self.position[2] += 0.1 * (action["choice"] + action["levels"].sum() + self.np_random.normal())
        self.position = np.clip(self.position, -5, 5)
        is_over = self.steps_left == 0
        reward = float(self.position.sum())
        return self._observation(), reward, is_over and self.ends == "terminated", is_over, {}

    def render(self) -> Any:
        return RED

    def _observation(self) -> dict[str, Any]:
        image = np.arange(72).reshape(6, 4, 3) + int(100 + 10 * self.position[0])
        return {
            "vector": self.position.astype(np.float32),
            "image": image.astype(np.uint8),
            "category": np.int64(int(self.position[0] > 0) + 2 * int(self.position[1] > 0)),
            "action_mask": np.ones(2, np.float32),
        }


class SimpleEnv(ZooEnv):
    """With a single observation and a single action, none of them in a dictionary."""

    action_space = spaces.Discrete(2)
    observation_space = spaces.Box(-5, 5, (3,))

    def step(self, action: Any) -> Any:
        return super().step({"choice": action, "force": np.zeros(2), "levels": np.zeros(2, np.int64)})

    def _observation(self) -> Any:
        return super()._observation()["vector"]


def zoo(length: int = 6, ends: str = "terminated") -> Any:
    return GymMazeEnv(ZooEnv(length, ends))


def simple(length: int = 6, ends: str = "terminated") -> Any:
    return GymMazeEnv(SimpleEnv(length, ends))


def with_dict_actions(length: int = 6, ends: str = "terminated") -> Any:
    return GymMazeEnv(DictActionWrapper(SimpleEnv(length, ends)))


def with_dict_observations(length: int = 6, ends: str = "terminated") -> Any:
    return GymMazeEnv(DictObservationWrapper(SimpleEnv(length, ends)))


def no_plot(value: list[np.ndarray], groups: tuple[str, str], **kwargs: Any) -> None:
    """Shows nothing."""


class ImageEnv(SimpleEnv):
    """Observes an image only."""

    observation_space = spaces.Box(0, 255, (6, 4, 3), np.uint8)

    def _observation(self) -> Any:
        return ZooEnv._observation(self)["image"]


def image_env() -> Any:
    return GymMazeEnv(ImageEnv())
