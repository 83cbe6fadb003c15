"""Environments of gymnasium that report a cost of each step in `info["cost"]`, as those of safety suites do."""

from __future__ import annotations

import importlib
from abc import ABC
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
from maze.core.wrappers.wrapper import Wrapper


class SafetyEvents(ABC):
    """Costs."""

    @define_epoch_stats(np.mean, output_name="mean_episode_total")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def episode_cost(self, value: float) -> None:
        """A step had a cost.

        :param value: The cost.
        """


class CostWrapper(Wrapper[Any]):
    """Report `info["cost"]` as an event.

    :param env: The environment.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: MazeEnv[Any]) -> None:
        super().__init__(env)
        self.safety_events = env.core_env.context.event_service.create_event_topic(SafetyEvents)

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        observation, reward, done, info = self.env.step(action)
        self.safety_events.episode_cost(value=float(info["cost"]))
        return observation, reward, done, info


def safety_env(name: str, package: str = "bullet_safety_gym") -> Any:
    """Return an environment whose costs are events.

    :param name: Its id.
    :param package: Module that registers it.
    """
    importlib.import_module(package)
    return CostWrapper.wrap(GymMazeEnv(name))
