"""Ambulances: at which station does an ambulance wait that has become free?"""

from __future__ import annotations

import math
from abc import ABC
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.env.action_conversion import DictActionConversion
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_env import MazeEnv
from maze.core.env.observation_conversion import DictObservationConversion
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats

DAY, KM_PER_MINUTE, MOST_MINUTES = 1440.0, 0.7, 8.0  # a response that takes longer is late
STATIONS = [(2.0, 2.0), (8.0, 2.0), (5.0, 5.0), (2.0, 8.0), (8.0, 8.0)]
HOMES = [0, 1, 2, 3, 4, 2]  # stations of the ambulances
DISTRICTS = [(2.0, 3.0), (7.0, 7.0), (5.0, 4.0)]  # around which calls come


class CallEvents(ABC):
    """Events of calls."""

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(np.mean)
    @define_step_stats(None)
    def call_answered(self, minutes: float) -> None:
        """An ambulance takes a call and reaches it in so many minutes after it came."""


class CallKpis(KpiCalculator):
    """Share of late responses."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: Any, last_maze_state: Any) -> dict[str, float]:
        calls = episode_event_log.query_events(CallEvents.call_answered)
        return {"late_share": sum(call.minutes > MOST_MINUTES for call in calls) / max(1, len(calls))}


def minutes_between(here: tuple[float, float], there: tuple[float, float]) -> float:
    """Return the time of driving between two places."""
    return math.dist(here, there) / KM_PER_MINUTE


class AmbulancesCoreEnv(CoreEnv):
    """The simulation: a step ends when an ambulance becomes free and no call waits. The nearest one takes a call."""

    def __init__(self) -> None:
        super().__init__()
        self.events = Pubsub(self.context.event_service).create_event_topic(CallEvents)
        self.rng = np.random.default_rng()

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    @override(CoreEnv)
    def reset(self) -> dict[str, Any]:
        self.now, self.n_late, self.free = 0.0, 0, 0
        self.at = [STATIONS[home] for home in HOMES]  # where each ambulance is, or will be
        self.there_at = [0.0] * len(HOMES)  # the time from which on it is there
        self.is_busy = [False] * len(HOMES)
        self.queue: list[tuple[float, tuple[float, float], float]] = []  # calls that wait: time, place, care
        self.call = self._next_call()
        self._advance()
        return self.get_maze_state()

    @override(CoreEnv)
    def step(self, maze_action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        station = STATIONS[int(maze_action["station"])]
        self.there_at[self.free] = self.now + minutes_between(self.at[self.free], station)
        self.at[self.free], self.is_busy[self.free] = station, False
        self.n_late = 0
        self._advance()
        return self.get_maze_state(), -float(self.n_late), self.now >= DAY, {}

    def _advance(self) -> None:
        """Continue until an ambulance is free that no call waits for."""
        while self.now < DAY:
            ends = [end if busy else math.inf for end, busy in zip(self.there_at, self.is_busy, strict=True)]
            unit = ends.index(min(ends))
            if self.call[0] <= ends[unit]:
                self.queue.append(self.call)
                self.now = self.call[0]
                self.call = self._next_call()
                idle = [unit for unit, busy in enumerate(self.is_busy) if not busy]
                if idle:
                    self._answer(min(idle, key=lambda unit: self._minutes(unit, self.queue[0][1])))
            else:
                self.now = ends[unit]
                if not self.queue:
                    self.free = unit
                    return
                self._answer(unit)

    def _minutes(self, unit: int, place: tuple[float, float]) -> float:
        return max(0.0, self.there_at[unit] - self.now) + minutes_between(self.at[unit], place)

    def _answer(self, unit: int) -> None:
        """Send an ambulance to the first call that waits."""
        called, place, care = self.queue.pop(0)
        arrival = self.now + self._minutes(unit, place)
        self.events.call_answered(minutes=arrival - called)
        self.n_late += arrival - called > MOST_MINUTES
        self.at[unit], self.there_at[unit], self.is_busy[unit] = place, arrival + care, True

    def _next_call(self) -> tuple[float, tuple[float, float], float]:
        """Draw time, place and minutes of care; the first district calls in the morning, the second in the evening."""
        wait, district, (x, y, care) = self.rng.exponential(12.0), self.rng.random(), self.rng.normal(size=3)
        morning = 0.5 + 0.5 * math.sin(2 * math.pi * self.now / DAY)
        x_mean, y_mean = DISTRICTS[0 if district < 0.7 * morning else 1 if district < 0.7 else 2]
        return self.now + wait, (x_mean + 1.5 * x, y_mean + 1.5 * y), 35.0 * math.exp(0.4 * care)

    @override(CoreEnv)
    def get_maze_state(self) -> dict[str, Any]:
        at_station = np.zeros(len(STATIONS))
        for unit, place in enumerate(self.at):
            if not self.is_busy[unit]:
                at_station[STATIONS.index(place)] += 1
        busy = [(end - self.now) / 60 for end, is_busy in zip(self.there_at, self.is_busy, strict=True) if is_busy]
        return {
            "at_station": at_station,
            "free_in": np.array(sorted(busy) + [0.0] * (len(HOMES) - len(busy))),
            "minutes": np.array([minutes_between(self.at[self.free], station) for station in STATIONS]) / 10,
            "home": np.eye(len(STATIONS))[HOMES[self.free]],
            "day": np.array([self.now / DAY]),
        }

    @override(CoreEnv)
    def clone_from(self, env: AmbulancesCoreEnv) -> None:  # type: ignore[override]
        self.rng.bit_generator.state = env.rng.bit_generator.state
        self.now, self.n_late, self.free, self.call = env.now, env.n_late, env.free, env.call
        self.at, self.there_at, self.is_busy, self.queue = [*env.at], [*env.there_at], [*env.is_busy], [*env.queue]

    @override(CoreEnv)
    def get_kpi_calculator(self) -> KpiCalculator:
        return CallKpis()


class AmbulancesEnv(MazeEnv[AmbulancesCoreEnv]):
    """The environment: one decision, the station."""

    def __init__(self) -> None:
        n_stations, n_units = len(STATIONS), len(HOMES)
        seen = {
            "at_station": spaces.Box(0, n_units, (n_stations,)),
            "free_in": spaces.Box(0, np.inf, (n_units,)),
            "minutes": spaces.Box(0, np.inf, (n_stations,)),
            "home": spaces.MultiBinary(n_stations),
            "day": spaces.Box(0, np.inf, (1,)),
        }
        actions = {"station": spaces.Discrete(n_stations)}
        super().__init__(AmbulancesCoreEnv(), {0: DictActionConversion(actions)}, {0: DictObservationConversion(seen)})


class HomeStation(Policy):
    """Each ambulance returns to its own station."""

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: Any = None,
        deterministic: bool = False,
    ) -> dict[str, int]:
        return {"station": int(observation["home"].argmax())}
