"""Drawing of simulation states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.errors import ConfigError
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer_args import RendererArg


class Renderer(ABC):
    """Draw states, independent of an environment, so that recordings can be drawn.

    Renderers that draw with matplotlib are compatible with the viewers.
    """

    @staticmethod
    def arguments() -> list[RendererArg]:
        """Return further arguments of :meth:`render` for which viewers show widgets. Default: none."""
        return []

    @abstractmethod
    def render(
        self, maze_state: MazeStateType, maze_action: MazeActionType | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        """Draw one step.

        :param maze_state: State in which the action is taken.
        :param maze_action: The action; `None` after the last step.
        :param events: Events of the step.
        :param kwargs: Values of the arguments in :meth:`arguments`.
        """


def renderer_of(env: Any) -> Renderer:
    """Return the renderer of a Maze environment.

    :raises ConfigError: It has none.
    """
    renderer: Renderer | None = env.get_renderer()
    if renderer is None:
        raise ConfigError(
            f"{type(env).__name__} cannot be drawn: it has no renderer. Return one from `get_renderer` of its CoreEnv."
        )
    return renderer


def draw_current_state(env: Any) -> None:
    """Draw the current state of a Maze environment, with the last action and its events.

    :raises ConfigError: The environment has no renderer.
    """
    events = StepEventLog(env.get_env_time())
    events.extend(env.get_step_events())
    renderer_of(env).render(env.get_maze_state(), env.get_maze_action(), events)
