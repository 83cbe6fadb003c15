"""Showing an environment while an agent acts in it."""

from __future__ import annotations

import io
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium

from maze.core.errors import ConfigError, MazeError
from maze.core.rendering.offscreen import figure_png, offscreen
from maze.core.rendering.renderer import draw_current_state
from maze.core.wrappers.maze_gym_env_wrapper import GymRenderer

if TYPE_CHECKING:
    from maze.core.env.structured_env import StructuredEnv

PICTURE_DIR = Path("rendering")


def has_display() -> bool:
    """Whether windows can be opened."""
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


class StepRenderer:
    """Draws an environment's current state with its renderer: in a window or, where there is no display, into files.

    :param env: Environment that is going to be drawn; it is not yet reset.
    :param picture_dir: Where pictures go without a display: `<episode id>/<number>.png`, one for each (sub-)step.
    """

    def __init__(self, env: StructuredEnv, picture_dir: Path = PICTURE_DIR) -> None:
        self._has_display = has_display()
        self._picture_dir = picture_dir
        self._episode_id: str | None = None
        self._n_pictures = 0
        set_render_mode = getattr(env, "set_render_mode", None)
        if not self._has_display:
            print(
                f"No display was found, so nothing is shown; pictures of all steps are written to {picture_dir}. To "
                f"watch, run this where windows can be opened (ssh -X, for instance).",
                flush=True,
            )
        if set_render_mode is not None and _render_mode(env) is None:
            set_render_mode("human" if self._has_display else "rgb_array")

    def __call__(self, env: Any) -> None:
        """Draws the current state."""
        try:
            if self._has_display:
                _draw(env)
            else:
                self._write(env.get_episode_id(), _picture(env))
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"runner.render: {env} cannot be drawn: {error}") from error
        except MazeError:
            raise
        except Exception as error:
            raise ConfigError(
                f"runner.render: {env} could not be drawn ({type(error).__name__}: {error}). "
                f"runner.render=false runs the rollout without."
            ) from error

    def _write(self, episode_id: str, png: bytes | None) -> None:
        if png is None:
            return  # the renderer prints, or draws by itself
        directory = self._picture_dir / episode_id
        if episode_id != self._episode_id:
            self._episode_id, self._n_pictures = episode_id, 0
            directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{self._n_pictures:05d}.png").write_bytes(png)
        self._n_pictures += 1


def _draw(env: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-interactive, and thus cannot be shown")
        draw_current_state(env)


def _picture(env: Any) -> bytes | None:
    """The current state as PNG; None if nothing was drawn."""
    gym_env = getattr(getattr(env, "core_env", None), "env", None)
    if isinstance(env.get_renderer(), GymRenderer) and getattr(gym_env, "render_mode", None) == "rgb_array":
        from PIL import Image

        png = io.BytesIO()
        pixels: Any = gym_env.render()  # type: ignore[union-attr]
        Image.fromarray(pixels).save(png, format="PNG", compress_level=1)
        return png.getvalue()
    with offscreen() as plt:
        _draw(env)
        return figure_png(plt.gcf()) if plt.get_fignums() else None


def _render_mode(env: Any) -> str | None:
    mode: str | None = getattr(getattr(getattr(env, "core_env", None), "env", None), "render_mode", None)
    return mode
