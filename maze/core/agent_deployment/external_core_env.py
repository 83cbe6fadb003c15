"""Replacement of the simulation in a deployment: waits for states of the real system."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum, auto
from queue import Queue, SimpleQueue
from threading import Event
from typing import Any, NamedTuple, Union

import numpy as np

from maze.core.annotations import override
from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.core_env import CoreEnv
from maze.core.env.environment_context import EnvironmentContext
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import EnvironmentContractError, MazeError, NonFiniteError
from maze.core.events.event_record import EventRecord
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.rendering.renderer import Renderer


class DeploymentError(MazeError):
    """A deployment is used incorrectly: after it was closed, in a wrong order, or by two threads at once."""


class EpisodeOverError(DeploymentError):
    """A wrapper, such as a time limit, ended the episode, so that there is no action for its last state.

    The episode is finished and counted. The next `act` expects the first state of another one.
    """


AnyQueue = Union[Queue, SimpleQueue]  # type: ignore[type-arg]  # of updates or of actions


class StateUpdate(NamedTuple):
    """Report of the real system: a new state, with reward, info and events of the last action."""

    maze_state: MazeStateType
    reward: float | np.ndarray | Any = 0.0
    done: bool = False
    info: Mapping[Any, Any] = {}
    events: Iterable[EventRecord] = ()
    is_step_complete: bool | None = None
    """Whether an environment step was completed; None: it follows from the actors."""
    is_last: bool = False
    """The episode ends with this state, whether it is over or not."""


class Signal(Enum):
    """Reply instead of an action."""

    EPISODE_AWAITED = auto()
    """The episode is finished; the next state is the first one of another episode."""
    EXECUTOR_ENDED = auto()
    """The thread has ended."""


class EpisodeAborted(BaseException):
    """Leave the environment's `step` or `reset` when no more states follow; wrappers must not handle it."""


class ExternalCoreEnv(CoreEnv):
    """Replace the simulation under a stack of wrappers.

    `step` passes the action on and blocks until the real system has reported the next state; `reset` blocks until the
    first state of the next episode is reported.

    :param context: Context of the environment, which wrappers and event topics refer to.
    :param state_queue: A :class:`StateUpdate` for each state; None aborts the episode.
    :param maze_action_queue: Receives actions and :class:`Signal`.
    :param rollout_done_event: When set, no more states follow, and `reset` does not wait.
    :param renderer: Renderer of the simulation.
    :param kpi_calculator: KPI calculator of the simulation.
    :param agent_counts_dict: Number of agents of each sub-step.
    """

    is_simulated = False

    def __init__(
        self,
        context: EnvironmentContext,
        state_queue: AnyQueue,
        maze_action_queue: AnyQueue,
        rollout_done_event: Event,
        renderer: Renderer | None = None,
        kpi_calculator: KpiCalculator | None = None,
        agent_counts_dict: Mapping[StepKeyType, int] | None = None,
    ) -> None:
        super().__init__(context)
        self.state_queue = state_queue
        self.maze_action_queue = maze_action_queue
        self.rollout_done_event = rollout_done_event
        self.renderer = renderer
        self.kpi_calculator = kpi_calculator
        self._agent_counts: dict[StepKeyType, int] = {0: 1} if agent_counts_dict is None else dict(agent_counts_dict)
        self._actor_id = ActorID(0, 0)
        self._is_actor_done = False
        self._is_step_complete: bool | None = None
        self._is_over = False
        self._actor_rewards: np.ndarray | None = None
        self._maze_state: MazeStateType | None = None

    @override(CoreEnv)
    def reset(self) -> MazeStateType:
        if not self.rollout_done_event.is_set():
            self.maze_action_queue.put(Signal.EPISODE_AWAITED)
            self._is_over = False
            self._receive()
        return self._maze_state

    @override(CoreEnv)
    def step(self, maze_action: MazeActionType) -> tuple[MazeStateType, float | np.ndarray | Any, bool, dict[Any, Any]]:
        if self._is_over:
            if self.rollout_done_event.is_set():
                raise EpisodeAborted
            raise EnvironmentContractError("A wrapper steps the environment after the end of the episode.")
        if self.context.step_actor_id is None:
            self.context.step_actor_id = self._actor_id
        self.maze_action_queue.put(maze_action)
        update = self._receive()
        info = dict(update.info)
        done = bool(update.done)
        if done or update.is_last:
            self._is_over = True
            if not done:
                done = info[TRUNCATION_KEY] = True
        reward: Any = update.reward
        has_shares = isinstance(reward, np.ndarray) and reward.size > 1
        self._actor_rewards = reward if has_shares else None
        return update.maze_state, float(reward.sum()) if has_shares else reward, done, info

    def _receive(self) -> StateUpdate:
        update = self.state_queue.get()
        if update is None:
            self._is_over = True
            raise EpisodeAborted
        self._maze_state = update.maze_state
        self._is_step_complete = update.is_step_complete
        for event in update.events:
            self.context.event_service.notify_event(event)
        return update  # type: ignore[no-any-return]

    def set_actor_id(self, new_value: ActorID) -> None:
        """Set the actor that acts next."""
        self._actor_id = new_value

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return self._actor_id

    def set_is_actor_done(self, new_value: bool) -> None:
        """Set whether the last actor is done."""
        self._is_actor_done = new_value

    @override(CoreEnv)
    def is_actor_done(self) -> bool:
        return self._is_actor_done

    @override(CoreEnv)
    def is_step_complete(self) -> bool:
        if self._is_step_complete is not None:
            return self._is_step_complete
        return bool(self._actor_id == self.context.step_actor_id)

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return self._agent_counts

    @override(CoreEnv)
    def get_actor_rewards(self) -> np.ndarray | None:
        return self._actor_rewards

    @override(CoreEnv)
    def get_maze_state(self) -> MazeStateType:
        return self._maze_state

    @override(CoreEnv)
    def get_renderer(self) -> Renderer | None:
        return self.renderer

    @override(CoreEnv)
    def get_kpi_calculator(self) -> KpiCalculator | None:
        return self.kpi_calculator

    @override(CoreEnv)
    def seed(self, seed: int) -> None:
        """Do nothing: the real system has the randomness."""


def checked(
    method: str,
    n_steps: int,
    maze_state: MazeStateType,
    reward: Any,
    done: bool,
    info: Any,
    events: Any,
    is_step_complete: bool | None,
    is_last: bool = False,
) -> StateUpdate:
    """Check the report of a state.

    :param method: The method that received it.
    :param n_steps: Actions of the episode so far.
    :param maze_state: The new state.
    :param reward: Reward of the last action: a number, or one for each actor; ignored before the first action.
    :param done: Whether the episode ended.
    :param info: Further information, a mapping; `None`: none.
    :param events: Events since the last state; `None`: none.
    :param is_step_complete: See :meth:`~maze.core.agent_deployment.agent_deployment.AgentDeployment.act`.
    :param is_last: Whether the episode ends with it.
    :raises EnvironmentContractError: A part of it is missing, or has a wrong type.
    :raises NonFiniteError: The reward is NaN or infinite.
    """
    where = f"{method}, after {n_steps} actions of the episode"
    if n_steps:
        try:
            is_finite = bool(np.isfinite(reward).all())
        except TypeError:
            raise EnvironmentContractError(
                f"{where}: `reward` must be a number, or an array with one for each actor (only the first state of an "
                f"episode has none), found {reward!r}."
            ) from None
        if not is_finite:
            raise NonFiniteError(f"{where}: `reward` is {reward}.")
    events = list(events or ())
    if not isinstance(info or {}, Mapping) or not all(isinstance(event, EventRecord) for event in events):
        raise EnvironmentContractError(
            f"{where}: `info` must be a mapping or None, and `events` must hold EventRecords, made by "
            f"EventRecord(Interface, Interface.event, attributes); found {info!r} and {events!r}."
        )
    return StateUpdate(maze_state, reward, done, info or {}, events, is_step_complete, is_last)
