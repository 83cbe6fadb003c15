"""Environments to try things out with."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationConversionInterface

N_STEPS = 10


class DummyCoreEnv(CoreEnv):
    """Show a number in each of ten steps; naming it has the reward 1."""

    def __init__(self) -> None:
        super().__init__()
        self._rng = np.random.default_rng(0)
        self._step = 0
        self._target = 0

    @override(CoreEnv)
    def reset(self) -> dict[str, int]:
        self._step = 0
        self._target = int(self._rng.integers(3))
        return self.get_maze_state()

    @override(CoreEnv)
    def step(self, maze_action: int) -> tuple[dict[str, int], float, bool, dict[Any, Any]]:
        reward = float(maze_action == self._target)
        self._step += 1
        self._target = int(self._rng.integers(3))
        return self.get_maze_state(), reward, self._step >= N_STEPS, {}

    @override(CoreEnv)
    def get_maze_state(self) -> dict[str, int]:
        return {"step": self._step, "target": self._target}

    @override(CoreEnv)
    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)


class DummyActionConversion(ActionConversionInterface):
    """The action is the number itself."""

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, Any], maze_state: MazeStateType) -> int:
        return int(action["number"])

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: MazeActionType) -> dict[str, Any]:
        return {"number": np.int64(maze_action)}

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return spaces.Dict({"number": spaces.Discrete(3)})


class DummyObservationConversion(ObservationConversionInterface):
    """The number that is shown, one-hot."""

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: MazeStateType) -> dict[str, np.ndarray]:
        return {"target": np.eye(3, dtype=np.float32)[maze_state["target"]]}

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return spaces.Dict({"target": spaces.Box(0.0, 1.0, (3,), np.float32)})


def build_dummy_maze_env() -> MazeEnv[DummyCoreEnv]:
    """Return an environment that shows a number, which the agent has to name."""
    return MazeEnv(DummyCoreEnv(), {0: DummyActionConversion()}, {0: DummyObservationConversion()})
