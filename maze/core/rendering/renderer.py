"""Drawing of simulation states."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.rendering.renderer_args import RendererArg

if TYPE_CHECKING:
    from maze.core.log_events.step_event_log import StepEventLog


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
