"""Export of Maze environments as gymnasium environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np

from maze.core.env.action_conversion import masked_heads
from maze.core.env.base_env import is_truncated
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.rendering.renderer import draw_current_state, figure_pixels, offscreen
from maze.core.wrappers.maze_gym_env_wrapper import GymRenderer

RENDER_MODES = ["human", "rgb_array"]


class MazeGymnasiumEnv(gymnasium.Env[Any, Any]):
    """A Maze environment with gymnasium's interface: five values from `step`, two from `reset`, seeds in `reset`.

    Spaces, observations and actions are those of the Maze environment: dictionaries, unless it is wrapped in a
    `NoDictSpacesWrapper`.

    :param env: A flat Maze environment (one sub-step, one agent) with all its wrappers.
    :param render_mode: How `render` draws: "human" or "rgb_array"; for environments that came from gymnasium, the
        modes of these. None: the mode of such an environment, otherwise no rendering.
    :raises ConfigError: The environment has several actors, or no such render mode.
    """

    def __init__(self, env: Any, render_mode: str | None = None) -> None:
        if not isinstance(env, MazeEnv):
            raise ConfigError(f"to_gymnasium: expected a Maze environment, found {type(env).__name__}.")
        counts = env.agent_counts_dict
        if len(env.action_spaces_dict) != 1 or any(n != 1 for n in counts.values()):
            raise ConfigError(
                f"to_gymnasium: {env!r} has the sub-steps {list(env.action_spaces_dict)} with {list(counts.values())} "
                "agents. A gymnasium environment has one actor; use the flat variant of the environment, or train it "
                "with Maze."
            )
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
            raise ConfigError(f"to_gymnasium: `render_mode` must be one of {modes}, found {render_mode!r}.")
        if inner is not None and render_mode is not None and inner.render_mode != render_mode:
            env.set_render_mode(render_mode)
        self.render_mode = render_mode if inner is None or render_mode is not None else inner.render_mode
        self._mask: np.ndarray | None = None
        self._mask_name: str | None = None
        (heads,) = dict_spaces(env, "action_spaces_dict").values()
        observed: Any = env.observation_space
        if isinstance(observed, gymnasium.spaces.Dict) and len(heads.spaces) == 1:
            self._mask_name = next(iter(mask_heads(observed, heads)), None)
        if self._mask_name is not None:
            self.action_masks = self._action_masks
            """Interface of sb3-contrib: bool `[n_actions]`, which actions are valid; only set if there is a mask."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start a new episode.

        :param seed: Seed of the Maze environment. None: its random generators continue.
        :param options: Not used.
        """
        super().reset(seed=seed)
        if seed is not None:
            self.maze_env.seed(seed)
        return self._observation(self.maze_env.reset()), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take one step.

        :param action: Action of the Maze environment, a dictionary of action heads unless it is wrapped in a
            `NoDictSpacesWrapper`.
        :return: Observation, reward, terminated, truncated and info. Terminated and truncated are never both true.
        """
        observation, reward, done, info = self.maze_env.step(action)
        truncated = is_truncated(done, info)
        return self._observation(observation), float(reward), bool(done) and not truncated, truncated, info or {}

    def render(self) -> Any:
        """Draw the current state: pixels for "rgb_array", a window for "human"."""
        if self._is_from_gymnasium:
            return self.maze_env.core_env.env.render()
        return drawn(self.maze_env, self.render_mode)

    def close(self) -> None:
        """Close the Maze environment."""
        self.maze_env.close()

    def _action_masks(self) -> np.ndarray | None:
        return self._mask

    def _observation(self, observation: Any) -> Any:
        """Convert an observation of Maze and store its mask."""
        if self._mask_name is not None:
            self._mask = np.asarray(observation[self._mask_name]) > 0
        return with_numbers(observation, self._discrete_keys)


def to_gymnasium(env: MazeEnv[Any], render_mode: str | None = None) -> MazeGymnasiumEnv:
    """Export a Maze environment to frameworks with gymnasium environments.

    :param env: A flat Maze environment with all its wrappers; for frameworks without dictionary spaces, the last one
        is a `NoDictSpacesWrapper`.
    :param render_mode: How `render` draws.
    """
    return MazeGymnasiumEnv(env, render_mode)


def dict_spaces(env: Any, name: str) -> Mapping[Any, Any]:
    """Return the spaces of an environment by step key, inside of wrappers that remove dictionaries.

    :param env: The environment.
    :param name: `observation_spaces_dict` or `action_spaces_dict`.
    """
    while not all(isinstance(space, gymnasium.spaces.Dict) for space in getattr(env, name).values()):
        env = env.env
    return getattr(env, name)  # type: ignore[no-any-return]  # environments of any type


def mask_heads(observation_space: gymnasium.spaces.Dict, action_space: gymnasium.spaces.Dict) -> dict[str, str]:
    """Return the action head of each mask among the observations.

    :param observation_space: Observations of a sub-step.
    :param action_space: Action heads of the sub-step.
    :return: Action heads by the names of the masks, without masks that might be for several heads.
    """
    shapes = {key: tuple(space.shape or ()) for key, space in observation_space.spaces.items()}
    return masked_heads(shapes, action_space, {})[0]


def drawn(env: MazeEnv[Any], render_mode: str | None) -> Any:
    """Draw the current state of a Maze environment.

    :param env: The environment.
    :param render_mode: `rgb_array` returns pixels, uint8 `[height, width, 3]`, without opening a window. `human` draws
        into a window. `None` issues a warning only.
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
    """Convert discrete parts of an observation, arrays without dimensions in Maze, to NumPy integers.

    :param observation: A dictionary, or its only part.
    :param keys: Keys of :func:`discrete_keys`.
    """
    if not keys:
        return observation
    if not isinstance(observation, dict):
        return np.int64(observation)
    return {**observation, **{key: np.int64(observation[key]) for key in keys}}


def discrete_keys(space: gymnasium.spaces.Space[Any]) -> list[str]:
    """Return the discrete parts of an observation space."""
    parts = space.spaces if isinstance(space, gymnasium.spaces.Dict) else {"observation": space}
    return [key for key, part in parts.items() if isinstance(part, gymnasium.spaces.Discrete)]
