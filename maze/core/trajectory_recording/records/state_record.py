"""Record of one environment step: state, action and events of the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from maze.core.env.maze_action import MazeActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.structured_env import ActorID
    from maze.core.log_events.step_event_log import StepEventLog


@dataclass(eq=False)
class StateRecord:
    """State, action, reward and events of one step, for rendering, replay and imitation learning.

    A reward that is an array has the shape `[n_actors]`.

    :param maze_state: State in which the action was taken.
    :param maze_action: The action; None for the last state of an episode.
    :param step_event_log: Events fired in the step.
    :param reward: Reward of the step; None for the last state.
    :param done: Whether the episode ended with the step; None for the last state.
    :param info: Info of the step; None for the last state.
    :param serializable_components: Further parts of the environment that belong to the state (e.g. random generators).
    :param actor_id: The actor in this state, if the simulation has several.
    :param substeps: If the simulation took several sub-steps, a record of each: its actor, state, action and share of
        the reward. The step itself has the state of the first and the action of the last one. The events of the step
        are in the last one.
    """

    maze_state: MazeStateType
    maze_action: MazeActionType | None
    step_event_log: StepEventLog | None
    reward: float | np.ndarray | Any
    done: bool | None
    info: dict[Any, Any] | None
    serializable_components: dict[str, Any]
    actor_id: ActorID | None = None
    substeps: Sequence[StateRecord] = ()

    def by_substep(self) -> Sequence[StateRecord]:
        """Return the records of the sub-steps; this record if there is only one."""
        return self.substeps or (self,)

    @property
    def env_time(self) -> int | None:
        """Environment time of the step, if events were recorded."""
        return self.step_event_log.env_time if self.step_event_log is not None else None
