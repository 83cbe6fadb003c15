"""Sees what the Maze environment at the bottom of a stack of wrappers gives, before any wrapper changes it."""

from __future__ import annotations

from typing import Any

from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID


class MazeEnvTap:
    """Stands in the step path of a Maze environment and remembers its last observation and its rewards.

    Costs nothing where it is not installed. It is neither pickled nor copied with the environment; whoever needs it
    installs it anew.

    :param env: The Maze environment below all wrappers.
    :param path: Its step path.
    """

    def __init__(self, env: MazeEnv[Any], path: Any) -> None:
        self.env = env
        self.path = path
        self.observation: Any = None
        """The last observation."""
        self.n_observations = 0
        """How many observations there were so far."""
        self.rewards: list[float] = []
        """The rewards since the list was cleared, by a reset or by a user of the tap before it steps."""
        self.actor = ActorID(0, 0)
        """The actor that the last observation is for."""

    @classmethod
    def install(cls, env: Any) -> MazeEnvTap:
        """The tap of the Maze environment at the bottom of ``env``; there is one, however often it is asked for."""
        maze_env = base_maze_env(env)
        path: Any = maze_env._step_path
        if not isinstance(path, cls):
            path = maze_env.__dict__["_step_path"] = cls(maze_env, path)
        return path  # type: ignore[no-any-return]

    def step(self, action: Any) -> Any:
        result = self.path.step(action)
        self._observe(result[0])
        self.rewards.append(result[1])
        return result

    def reset(self) -> Any:
        observation = self.path.reset()
        self.rewards.clear()
        self._observe(observation)
        return observation

    def _observe(self, observation: Any) -> None:
        self.observation = observation
        self.n_observations += 1
        self.actor = self.env.actor_id()


def base_maze_env(env: Any) -> MazeEnv[Any]:
    """The Maze environment below all wrappers."""
    while not issubclass(type(env), MazeEnv):
        env = env.env
    return env  # type: ignore[no-any-return]
