"""Takes pictures of gymnasium environments while they run."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.errors import ConfigError
from maze.core.rendering.offscreen import RecordedFramesRenderer
from maze.core.rendering.renderer import Renderer
from maze.core.wrappers.maze_gym_env_wrapper import GymRenderer
from maze.core.wrappers.wrapper import Wrapper

_PICTURE_MODES = ("rgb_array", "rgb_array_list")


def draws_frames_only(env: Any) -> bool:
    """Whether an environment draws its current state alone, as pictures, and no frames are recorded of it yet.

    :param env: A Maze environment.
    """
    if not isinstance(env.get_renderer(), GymRenderer):
        return False
    gym_env = env.core_env.env
    if getattr(gym_env, "render_mode", None) in _PICTURE_MODES:
        return True
    return env.core_env.can_be_made_again and "rgb_array" in gym_env.metadata.get("render_modes", [])


def with_frames(env: Any, every_k_steps: int = 1) -> Any:
    """Wrap an environment that draws its current state alone in a :class:`FrameRecordingWrapper`.

    Other environments are returned as they are. Where a library that the environment draws with is not installed, its
    episodes are recorded without pictures.

    :param env: A Maze environment.
    :param every_k_steps: Record a frame only every so many environment steps.
    """
    if not draws_frames_only(env):
        return env
    return FrameRecordingWrapper.wrap(env, every_k_steps=every_k_steps, is_optional=True)


def missing_for_drawing(env: Any) -> str | None:
    """Return what gymnasium says is not installed for drawing an environment; `None`: nothing is missing.

    :param env: A Maze environment.
    """
    if not draws_frames_only(env):
        return None
    gym_env = env.core_env.env
    spec = getattr(gym_env, "spec", None)
    drawn: Any = gym_env if spec is None else gymnasium.make(spec, render_mode="rgb_array")
    try:
        drawn.unwrapped.render()
    except gymnasium.error.DependencyNotInstalled as error:
        return str(error)
    except Exception:  # there is no state to draw before the first reset
        return None
    finally:
        if drawn is not gym_env:
            drawn.close()
    return None


class FrameRecordingWrapper(Wrapper[MazeEnv[Any]]):
    """Records a frame for each state of an episode, so that recorded trajectories can be viewed afterwards.

    gymnasium environments draw their current state only. With this wrapper their renderer shows the frames of the
    episode, and is stored with its trajectory. Environments with a Maze renderer need none of this: they draw any
    recorded state.

    :param env: A Maze environment made of a gymnasium one that renders "rgb_array"; one that was made from an id
        without such a render mode is made again with it.
    :param every_k_steps: Record a frame only every so many environment steps.
    :param is_optional: Record episodes without frames where a library for drawing is not installed.
    :raises ConfigError: The environment draws no pictures, or `every_k_steps` is below 1.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: MazeEnv[Any], every_k_steps: int = 1, is_optional: bool = False) -> None:
        if every_k_steps < 1:
            raise ConfigError(f"FrameRecordingWrapper: `every_k_steps` must be at least 1, got {every_k_steps}.")
        if not isinstance(env.get_renderer(), GymRenderer):
            raise ConfigError(
                f"FrameRecordingWrapper: {env!r} is no gymnasium environment. Its recorded states can be drawn by its "
                f"renderer at any time; frames are not needed."
            )
        self.every_k_steps = every_k_steps
        self.is_optional = is_optional
        self._can_draw = True
        self._renderer = RecordedFramesRenderer()
        super().__init__(env)
        if self._gym_env().render_mode not in _PICTURE_MODES:
            modes = self._gym_env().metadata.get("render_modes", [])
            if "rgb_array" not in modes:
                raise ConfigError(f"FrameRecordingWrapper: {env!r} does not render `rgb_array`, only {modes}.")
            self.env.set_render_mode("rgb_array")

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        result: tuple[Any, Any, bool, dict[Any, Any]] = self._env_step(action)
        env_time = self.env.get_env_time()
        # the sub-steps of a step share its first frame
        if result[2] or (self.env.context.is_step_complete and env_time % self.every_k_steps == 0):
            self._take_frame(env_time)
        return result

    @override(Wrapper)
    def reset(self) -> Any:
        observation = self._env_reset()
        # A new one: the last episode's frames belong to its trajectory, which may be read later.
        self._renderer = RecordedFramesRenderer()
        self._take_frame(self.env.get_env_time())
        return observation

    def get_renderer(self) -> Renderer:
        """Shows the frames of the current episode."""
        return self._renderer

    def _take_frame(self, env_time: int) -> None:
        if not self._can_draw:
            return
        try:
            picture: Any = self._gym_env().render()
        except gymnasium.error.DependencyNotInstalled as error:
            if self.is_optional:
                self._can_draw = False
                print(f"Episodes are recorded as numbers, without pictures: {error}", flush=True)
                return
            raise ConfigError(f"FrameRecordingWrapper: {self.env!r} cannot be drawn: {error}") from error
        if isinstance(picture, list):
            picture = picture[-1] if picture else None
        if not isinstance(picture, np.ndarray):
            raise ConfigError(
                f"FrameRecordingWrapper: {self.env!r} rendered {type(picture).__name__} instead of an array of pixels."
            )
        self._renderer.add(env_time, picture)

    def _gym_env(self) -> Any:
        return self.env.core_env.env

    def __getstate__(self) -> dict[str, Any]:
        self._release_surfaces()
        return super().__getstate__()

    def _release_surfaces(self) -> None:
        """Drops what pygame drew on, which can be neither pickled nor copied; it is made anew for the next frame."""
        env = self._gym_env().unwrapped
        for name, value in vars(env).items():
            if type(value).__module__.partition(".")[0] == "pygame":
                setattr(env, name, None)

    @override(Wrapper)
    def clone_from(self, env: FrameRecordingWrapper) -> None:
        env._release_surfaces()
        super().clone_from(env)
        self._renderer = RecordedFramesRenderer()
        self._renderer.frames = dict(env._renderer.frames)
