"""Dispatching with an actor for each vehicle, or with one for all of them."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Any

import numpy as np

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID, StepKeyType
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze_envs.common.grid_renderer import GridRenderer
from maze_envs.logistics.dispatching.events import DispatchingEvents
from maze_envs.logistics.dispatching.simulation import DispatchingSimulation, Vehicle

INVALID_ASSIGNMENT_PENALTY = 0.1


class DispatchingKpiCalculator(KpiCalculator):
    """Share of the orders that were late, and distance for each order that a vehicle was sent to."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: EpisodeEventLog, last_maze_state: MazeStateType) -> dict[str, float]:
        log, events = episode_event_log, DispatchingEvents
        distances = [event.attributes["distance"] for event in log.query_events(events.order_assigned)]
        n_lost, n_late = (sum(1 for _ in log.query_events(event)) for event in (events.order_lost, events.order_late))
        return {
            "late_share": n_late / max(1, len(distances) + n_lost),
            "distance_per_order": sum(distances) / max(1, len(distances)),
        }


class DispatchingCoreEnv(CoreEnv):
    """Base of the structured and the flat dispatching environment.

    :param simulation: The simulation.
    """

    def __init__(self, simulation: DispatchingSimulation) -> None:
        super().__init__()
        self.simulation = simulation
        self.pubsub = Pubsub(self.context.event_service)
        self.events = self.pubsub.create_event_topic(DispatchingEvents)
        self.renderer = GridRenderer(simulation.size)
        self.kpi_calculator = DispatchingKpiCalculator()

    @abstractmethod
    def _begin_step(self) -> None:
        """Prepare the next decisions."""

    @override(CoreEnv)
    def reset(self) -> dict[str, Any]:
        self.simulation.reset()
        self._begin_step()
        maze_state: dict[str, Any] = self.get_maze_state()
        return maze_state

    def orders_seen_by(self, vehicle: Vehicle) -> np.ndarray:
        """Return for each slot whether there is an order, its distance, and how long it can wait, all from 0 to 1."""
        simulation = self.simulation
        seen = [(0.0, 0.0, 0.0)] * simulation.n_slots
        for slot, order in enumerate(simulation.orders):
            if order is not None:
                nearness = 1.0 - simulation.distance(vehicle, order) / (2 * simulation.size)
                patience = (order.lost_at - simulation.time) / simulation.patience
                seen[slot] = (1.0, nearness, patience)
        return np.array(seen, dtype=np.float32)

    def time_left_of(self, vehicle: Vehicle) -> list[float]:
        """Return the remaining parts of the vehicle's shift and of the day."""
        simulation = self.simulation
        shift = max(0, vehicle.shift_end - simulation.time) / simulation.shift_length
        return [min(1.0, shift), max(0, simulation.horizon - simulation.time) / simulation.horizon]

    def drawing(self) -> dict[str, list[tuple[int, int]]]:
        """Return positions for the renderer."""
        simulation = self.simulation
        idle = [vehicle.position for vehicle in simulation.idle_vehicles()]
        busy = [vehicle.position for vehicle in simulation.vehicles if vehicle.idle_from > simulation.time]
        orders = [order.position for order in simulation.orders if order is not None]
        return {"idle vehicles": idle, "destinations": busy, "orders": orders}

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        self.simulation.rng = np.random.default_rng(seed)

    @override(CoreEnv)
    def get_serializable_components(self) -> dict[str, Any]:
        return {"simulation": self.simulation}

    @override(CoreEnv)
    def get_renderer(self) -> GridRenderer:
        return self.renderer

    @override(CoreEnv)
    def get_kpi_calculator(self) -> DispatchingKpiCalculator:
        return self.kpi_calculator

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        assert isinstance(env, DispatchingCoreEnv)
        shared = ("context", "pubsub", "events", "renderer", "kpi_calculator", "simulation")
        for name, value in vars(env).items():
            if name not in shared:
                setattr(self, name, copy.deepcopy(value))
        self.simulation = env.simulation.copy()


class MultiAgentDispatchingCoreEnv(DispatchingCoreEnv):
    """The idle vehicles choose in turn; each sees what those before it have left.

    :param simulation: The simulation.
    """

    STEP_KEY = "vehicle"

    def __init__(self, simulation: DispatchingSimulation) -> None:
        super().__init__(simulation)
        self._queue: list[int] = []
        """Identities of the vehicles that act in this step and have not acted yet."""
        self._actor_rewards: list[float] = []
        self._is_step_complete = False
        self._has_left = False
        self._n_decisions = 0
        self._decisions: dict[int, int] = {}
        """Number of the latest decision in the episode, by vehicle."""

    @override(DispatchingCoreEnv)
    def _begin_step(self) -> None:
        self._n_decisions, self._decisions = 0, {}
        self._queue = [vehicle.agent_id for vehicle in self.simulation.idle_vehicles()]
        self._is_step_complete = True  # none has begun
        self._has_left = False

    @override(CoreEnv)
    def step(self, maze_action: dict[str, int]) -> tuple[dict[str, Any], float, bool, dict[Any, Any]]:
        if self._is_step_complete:
            self._actor_rewards = []
        vehicle = self._acting()
        acted = self._queue.pop(0)
        self._decisions[acted] = self._n_decisions
        self._n_decisions += 1
        reward = self._reward_of(vehicle, maze_action["order"])
        self._actor_rewards.append(reward)
        self._is_step_complete = not self._queue or not self.simulation.has_open_orders()
        left: list[int] = []
        if self._is_step_complete:
            left = self.simulation.advance(self.events)
            self._queue = [idle.agent_id for idle in self.simulation.idle_vehicles()]
        # Who is on the way until the end of the shift goes home from there.
        self._has_left = acted in left or vehicle.idle_from >= vehicle.shift_end
        # Vehicles that waited, and go home before it is their turn again.
        others = [self._decisions[one] for one in left if one != acted and one in self._decisions]
        info = {ACTORS_DONE_KEY: [self._n_decisions - 1 - number for number in others]} if others else {}
        return self.get_maze_state(), reward, self.simulation.is_over(), info

    def _reward_of(self, vehicle: Vehicle, choice: int) -> float:
        if choice == self.simulation.n_slots:
            return 0.0  # waits
        earned = self.simulation.assign(vehicle, choice, self.events)
        return -INVALID_ASSIGNMENT_PENALTY if earned is None else earned

    def _acting(self) -> Vehicle:
        vehicles = self.simulation.vehicles
        if self._queue:
            for vehicle in vehicles:
                if vehicle.agent_id == self._queue[0]:
                    return vehicle
        return vehicles[0]

    @override(CoreEnv)
    def get_maze_state(self) -> dict[str, Any]:
        vehicle = self._acting()
        orders = self.orders_seen_by(vehicle)
        mask = np.ones(len(orders) + 1, dtype=np.float32)  # waiting is always possible
        mask[:-1] = orders[:, 0]
        return {
            "orders": orders,
            "time_left": self.time_left_of(vehicle),
            "order_mask": mask,
            "drawing": self.drawing(),
        }

    @override(CoreEnv)
    def is_step_complete(self) -> bool:
        return self._is_step_complete

    @override(CoreEnv)
    def get_actor_rewards(self) -> np.ndarray:
        return np.array(self._actor_rewards)

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return ActorID(self.STEP_KEY, self._acting().agent_id)

    @override(CoreEnv)
    def is_actor_done(self) -> bool:
        return self._has_left

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return {self.STEP_KEY: -1}


class FlatDispatchingCoreEnv(DispatchingCoreEnv):
    """One actor chooses for all vehicles at once; for those that are not idle the choice has no meaning.

    :param simulation: The simulation.
    """

    @override(DispatchingCoreEnv)
    def _begin_step(self) -> None:
        """Return all idle vehicles are decided for at once."""

    @override(CoreEnv)
    def step(self, maze_action: dict[str, int]) -> tuple[dict[str, Any], float, bool, dict[Any, Any]]:
        simulation = self.simulation
        reward = 0.0
        for index, vehicle in enumerate(simulation.vehicles):
            choice = maze_action[f"vehicle_{index}"]
            if vehicle.idle_from > simulation.time or choice == simulation.n_slots:
                continue
            if not simulation.has_open_orders():
                break
            earned = simulation.assign(vehicle, choice, self.events)
            reward += -INVALID_ASSIGNMENT_PENALTY if earned is None else earned
        simulation.advance(self.events)
        return self.get_maze_state(), reward, simulation.is_over(), {}

    @override(CoreEnv)
    def get_maze_state(self) -> dict[str, Any]:
        simulation = self.simulation
        vehicles = simulation.vehicles
        return {
            "orders": [self.orders_seen_by(vehicle) for vehicle in vehicles],
            "time_left": [self.time_left_of(vehicle) for vehicle in vehicles],
            "is_idle": [float(vehicle.idle_from <= simulation.time) for vehicle in vehicles],
            "drawing": self.drawing(),
        }
