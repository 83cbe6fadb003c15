"""State, action and events of one environment step, independent of spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from maze.core.env.maze_action import MazeActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.log_events.step_event_log import StepEventLog


class StateRecord:
    """One step of an episode in terms of the simulation: what rendering, replay and imitation learning need.

    A reward that is an array has the shape `[n_actors]`.

    :param maze_state: State in which the action was taken.
    :param maze_action: The action; None for the last state of an episode.
    :param step_event_log: Events fired in the step.
    :param reward: Reward of the step; None for the last state.
    :param done: Whether the episode ended with the step; None for the last state.
    :param info: Info of the step; None for the last state.
    :param serializable_components: Further parts of the environment that belong to the state (e.g. random generators).
    """

    def __init__(
        self,
        maze_state: MazeStateType,
        maze_action: MazeActionType | None,
        step_event_log: StepEventLog | None,
        reward: float | np.ndarray | Any,
        done: bool | None,
        info: dict[Any, Any] | None,
        serializable_components: dict[str, Any],
    ) -> None:
        self.maze_state = maze_state
        self.maze_action = maze_action
        self.step_event_log = step_event_log
        self.reward = reward
        self.done = done
        self.info = info
        self.serializable_components = serializable_components

    @property
    def env_time(self) -> int | None:
        """Environment time of the step, if events were recorded."""
        return self.step_event_log.env_time if self.step_event_log is not None else None
