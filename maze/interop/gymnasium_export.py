"""Maze environments as gymnasium environments."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.agent.random_policy import masked_heads
from maze.core.env.base_env import is_truncated
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rendering.offscreen import figure_pixels, offscreen
from maze.core.rendering.renderer import draw_current_state
from maze.core.wrappers.maze_gym_env_wrapper import GymRenderer

RENDER_MODES = ["human", "rgb_array"]


class MazeGymnasiumEnv(gymnasium.Env[Any, Any]):
    """A Maze environment with gymnasium's interface: five values from `step`, two from `reset`, seeds in `reset`.

    Spaces, observations and actions are those of the Maze environment: dictionaries, unless it is wrapped into a
    `NoDictSpacesWrapper`.

    :param env: A flat Maze environment (one sub-step, one agent) with all its wrappers.
    :param render_mode: How `render` draws: "human" or "rgb_array"; for environments that came from gymnasium, the
        modes that these have. None: the mode that such an environment was made with, otherwise no rendering.
    :raises ConfigError: The environment has several actors, or no such render mode.
    """

    def __init__(self, env: MazeEnv[Any], render_mode: str | None = None) -> None:
        _require_flat(env)
        self.maze_env = env
        """The Maze environment."""
        self.observation_space = env.observation_space
        self.action_space = env.action_space
        self._discrete_keys = discrete_keys(self.observation_space)
        self._is_from_gymnasium = isinstance(env.get_renderer(), GymRenderer)
        inner = env.core_env.env if self._is_from_gymnasium else None
        self.metadata = dict(inner.metadata) if inner is not None else {"render_modes": RENDER_MODES}
        self.metadata.setdefault("render_fps", 10)
        modes = self.metadata.get("render_modes", [])
        if render_mode is not None and render_mode not in modes:
            raise ConfigError(f"to_gymnasium: `render_mode` must be one of {modes}, got {render_mode!r}.")
        if inner is not None and render_mode is not None and inner.render_mode != render_mode:
            env.set_render_mode(render_mode)
        self.render_mode = render_mode if inner is None or render_mode is not None else inner.render_mode
        self._mask: np.ndarray | None = None
        if (name := mask_of(env)) is not None:
            self._mask_name = name
            self.action_masks = self._action_masks
            """As sb3-contrib asks for it: bool `[n_actions]`, which actions are valid; only where there is a mask."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts a new episode.

        :param seed: Seeds the Maze environment first. None: its random numbers go on.
        :param options: Not used.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.maze_env.seed(seed)
        return self._observation(self.maze_env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Takes one step; terminated and truncated are told apart, and are never both true."""
        observation, reward, done, info = self.maze_env.step(action)
        truncated = is_truncated(done, info)
        return self._observation(observation), float(reward), bool(done) and not truncated, truncated, info

    def render(self) -> Any:
        """The current state: pixels for "rgb_array"; shown in a window for "human"."""
        if self._is_from_gymnasium:
            return self.maze_env.core_env.env.render()
        return drawn(self.maze_env, self.render_mode)

    def close(self) -> None:
        """Closes the Maze environment."""
        self.maze_env.close()

    def _action_masks(self) -> np.ndarray:
        if self._mask is None:
            raise EnvironmentContractError("action_masks: the environment has not been reset.")
        return self._mask

    def _observation(self, observation: Any) -> Any:
        """The observation with NumPy integers for discrete parts, where Maze has arrays without dimensions."""
        if hasattr(self, "_mask_name"):
            self._mask = np.asarray(observation[self._mask_name]) > 0
        return with_numbers(observation, self._discrete_keys)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.maze_env!r})"


def to_gymnasium(env: MazeEnv[Any], render_mode: str | None = None) -> MazeGymnasiumEnv:
    """Exports a Maze environment to any framework that takes gymnasium environments.

    :param env: A flat Maze environment with all its wrappers; for frameworks without dictionary spaces with a
        `NoDictSpacesWrapper` as the last of them.
    :param render_mode: How `render` draws.
    """
    return MazeGymnasiumEnv(env, render_mode)


def mask_of(env: Any) -> str | None:
    """The observation that masks the only action there is; `None`: there is none, or there are several actions.

    :param env: A Maze environment with its wrappers; actions may have lost their dictionary.
    """
    observation_space, inner = env.observation_space, env
    if not isinstance(observation_space, spaces.Dict):
        return None
    while not isinstance(inner.action_space, spaces.Dict):
        inner = inner.env
    if len(inner.action_space.spaces) != 1:
        return None
    shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
    return next(iter(masked_heads(shapes, inner.action_space, {})[0]), None)


def drawn(env: MazeEnv[Any], render_mode: str | None) -> Any:
    """Draws the current state of a Maze environment.

    :param env: The environment.
    :param render_mode: `rgb_array` gives pixels, uint8 `[height, width, 3]`, without opening a window.
    """
    if render_mode is None:
        gymnasium.logger.warn(
            'render() does nothing: export the environment with a render mode, such as render_mode="rgb_array".'
        )
        return None
    if render_mode == "human":
        draw_current_state(env)
        return None
    with offscreen() as plt:
        draw_current_state(env)
        return figure_pixels(plt.gcf())


def with_numbers(observation: Any, keys: list[str]) -> Any:
    """The observation with NumPy integers for discrete parts, where Maze has arrays without dimensions.

    :param observation: A dictionary, or the only part.
    :param keys: As of :func:`discrete_keys`.
    """
    if not keys:
        return observation
    if not isinstance(observation, dict):
        return np.int64(observation)
    return {**observation, **{key: np.int64(observation[key]) for key in keys}}


def discrete_keys(space: spaces.Space[Any]) -> list[str]:
    """The parts of an observation space that are discrete."""
    parts = space.spaces.items() if isinstance(space, spaces.Dict) else [("observation", space)]
    return [key for key, part in parts if isinstance(part, spaces.Discrete)]


def _require_flat(env: MazeEnv[Any]) -> None:
    is_maze: Any = isinstance(env, MazeEnv)
    if not is_maze:
        raise ConfigError(f"to_gymnasium: expected a Maze environment, got {type(env).__name__}.")
    counts = env.agent_counts_dict
    if len(env.action_spaces_dict) != 1 or any(n != 1 for n in counts.values()):
        raise ConfigError(
            f"to_gymnasium: {env!r} has the sub-steps {list(env.action_spaces_dict)} with {list(counts.values())} "
            f"agents. A gymnasium environment has one actor; use the flat variant of the environment, or train it with "
            f"Maze."
        )
