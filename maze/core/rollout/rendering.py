"""Showing an environment while an agent acts in it."""

from __future__ import annotations

import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

import gymnasium

from maze.core.errors import ConfigError, MazeError
from maze.core.log_events.step_event_log import StepEventLog

if TYPE_CHECKING:
    from maze.core.env.structured_env import StructuredEnv


def has_display() -> bool:
    """Whether windows can be opened."""
    if sys.platform in ("win32", "darwin"):
        return True
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"))


class StepRenderer:
    """Draws an environment's current state with its renderer, on machines without a display as well.

    :param env: Environment that is going to be drawn; it is not yet reset.
    """

    def __init__(self, env: StructuredEnv) -> None:
        set_render_mode = getattr(env, "set_render_mode", None)
        if not has_display():
            print(
                "No display was found, so nothing is shown. To watch, run this where windows can be opened "
                "(ssh -X, for instance).",
                flush=True,
            )
        if set_render_mode is not None and _render_mode(env) is None:
            set_render_mode("human" if has_display() else "rgb_array")

    def __call__(self, env: Any) -> None:
        """Draws the current state."""
        events = StepEventLog(env.get_env_time())
        events.extend(env.get_step_events())
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*non-interactive, and thus cannot be shown")
                env.get_renderer().render(
                    maze_state=env.get_maze_state(), maze_action=env.get_maze_action(), events=events
                )
        except gymnasium.error.DependencyNotInstalled as error:
            raise ConfigError(f"runner.render: {env} cannot be drawn: {error}") from error
        except MazeError:
            raise
        except Exception as error:
            raise ConfigError(
                f"runner.render: {env} could not be drawn ({type(error).__name__}: {error}). "
                f"runner.render=false runs the rollout without."
            ) from error


def _render_mode(env: Any) -> str | None:
    mode: str | None = getattr(getattr(getattr(env, "core_env", None), "env", None), "render_mode", None)
    return mode
