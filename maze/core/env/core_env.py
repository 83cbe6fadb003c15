"""Interface of simulations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from maze.core.annotations import override
from maze.core.env.environment_context import EnvironmentContext
from maze.core.env.event_env_mixin import EventEnvMixin
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.serializable_env_mixin import SerializableEnvMixin
from maze.core.env.structured_env import ActorID, StepKeyType, StructuredEnv
from maze.core.env.time_env_mixin import TimeEnvMixin

if TYPE_CHECKING:
    from maze.core.events.event_record import EventRecord
    from maze.core.log_events.kpi_calculator import KpiCalculator
    from maze.core.rendering.renderer import Renderer

_ONLY_ACTOR = ActorID(0, 0)


class CoreEnv(StructuredEnv, EventEnvMixin, SerializableEnvMixin, TimeEnvMixin, ABC):
    """Simulation with states and actions of its own, which may be any objects.

    :class:`~maze.core.env.maze_env.MazeEnv` makes it trainable. Subclasses implement `reset`, `step`, `seed` and
    `get_maze_state`; all other methods have defaults: a single actor, no KPIs, no renderer, no resources to release.

    :param context: Shared context; a new one by default.
    """

    def __init__(self, context: EnvironmentContext | None = None) -> None:
        self.context = context if context is not None else EnvironmentContext()

    @override(StructuredEnv)
    @abstractmethod
    def step(self, maze_action: MazeActionType) -> tuple[MazeStateType, float | np.ndarray | Any, bool, dict[Any, Any]]:
        """Take one (sub-)step.

        :param maze_action: Action of the simulation.
        :return: State, reward, whether the episode has ended, and further information.
        """

    @override(StructuredEnv)
    @abstractmethod
    def reset(self) -> MazeStateType:
        """Start a new episode.

        :return: The first state.
        """

    @override(StructuredEnv)
    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed every random generator of the simulation.

        :param seed: A non-negative integer.
        """

    @override(StructuredEnv)
    def close(self) -> None:
        """Release the resources of the simulation. Default: there are none."""

    @abstractmethod
    def get_maze_state(self) -> MazeStateType:
        """Return the current state, without side effects."""

    @override(TimeEnvMixin)
    def get_env_time(self) -> int:
        return self.context.step_id

    def is_step_complete(self) -> bool:
        """Return whether the last sub-step completed an environment step.

        By default a step is complete when the next actor is the one that started it. Override this if actors are
        chosen freely (hierarchies) or may leave during a step.
        """
        return bool(self.actor_id() == self.context.step_actor_id)

    @override(EventEnvMixin)
    def get_step_events(self) -> Iterable[EventRecord]:
        return self.context.event_service.iterate_event_records()

    @override(EventEnvMixin)
    def get_kpi_calculator(self) -> KpiCalculator | None:
        return None

    @override(SerializableEnvMixin)
    def get_serializable_components(self) -> dict[str, Any]:
        return {}

    def get_renderer(self) -> Renderer | None:
        """Return the renderer of this simulation. Default: `None`, there is none."""
        return None

    @override(StructuredEnv)
    def actor_id(self) -> ActorID:
        return _ONLY_ACTOR

    @override(StructuredEnv)
    def is_actor_done(self) -> bool:
        return False

    @property
    @override(StructuredEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return {0: 1}

    def clone_from(self, env: CoreEnv) -> None:
        """Take over the state of another simulation, random generators included.

        :param env: A simulation of the same type and configuration.
        :raises NotImplementedError: The simulation does not implement cloning.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot be cloned; implement `clone_from` to plan with it.")

    is_simulated: ClassVar[bool] = True
    """False for a simulation that represents a real system, of which only the reported state is known."""

    def load_maze_state(self, maze_state: MazeStateType, actor_id: ActorID) -> None:
        """Take over the state that a real system reports, for planning in a deployment.

        :param maze_state: The state, as :meth:`get_maze_state` returns it.
        :param actor_id: The actor that acts next.
        :raises NotImplementedError: The simulation does not implement it.
        """
        raise NotImplementedError(f"{type(self).__name__}: implement `load_maze_state` to plan for a real system.")

    def new_future(self, seed: int) -> None:
        """Replace the random numbers of the running episode; the state stays.

        Default: :meth:`seed`. Override this where `seed` takes effect with the next reset only, and where the future
        is drawn in advance (such as all orders of an episode at its reset): draw the undisclosed part again then.

        :param seed: Any integer. Copies of a state with equal seeds and equal actions have equal trajectories.
        """
        self.seed(seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"
