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
    """Draws what it is given and keeps no connection to an environment, so that recordings can be drawn later.

    Draw with matplotlib to be compatible with the viewers.
    """

    @staticmethod
    def arguments() -> list[RendererArg]:
        """Further arguments of :meth:`render` that a viewer offers its user. Default: none."""
        return []

    @abstractmethod
    def render(
        self, maze_state: MazeStateType, maze_action: MazeActionType | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        """Draws one step.

        :param maze_state: State in which the action is about to be taken.
        :param maze_action: The action; None where there is none (after the last step).
        :param events: Events of the step.
        :param kwargs: Values of the arguments that :meth:`arguments` declares.
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
    """Draw the state that a Maze environment is in, with the action and the events that led to it.

    :raises ConfigError: The environment has no renderer.
    """
    events = StepEventLog(env.get_env_time())
    events.extend(env.get_step_events())
    renderer_of(env).render(env.get_maze_state(), env.get_maze_action(), events)
