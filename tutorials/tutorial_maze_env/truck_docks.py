"""Truck docks: which waiting truck is unloaded next, and at which dock?"""

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
from maze.core.env.structured_env import ActorID
from maze.core.events.pubsub import Pubsub
from maze.core.log_events.kpi_calculator import KpiCalculator
from maze.core.log_stats.event_decorators import define_episode_stats, define_epoch_stats, define_step_stats
from maze.core.rendering.renderer import Renderer

PERIODS, PLACES, DOCKS = 96, 6, 4  # quarters of an hour of a day; trucks that can wait; docks
KINDS = ("dry", "chilled", "bulky")
# by kind, the last row for an empty place: periods of unloading at each dock (0: impossible)
UNLOADING = np.array([[5, 5, 6, 7], [0, 0, 5, 6], [0, 7, 0, 8], [0, 0, 0, 0]])
COST = np.array([0.05, 0.2, 0.1, 0.0])  # of a period of waiting, likewise
TURNED_AWAY = 2.0  # cost of a truck for which there is no place
NO_TRUCK = PLACES  # the action that unloads none in this period


class DockEvents(ABC):
    """Events of the docks."""

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    def truck_docked(self, periods_waited: int) -> None:
        """A truck drives to a dock."""

    @define_epoch_stats(np.mean, output_name="mean_per_episode")
    @define_episode_stats(len)
    @define_step_stats(len)
    def truck_turned_away(self) -> None:
        """A truck finds no place."""


class DockKpis(KpiCalculator):
    """Mean waiting time in periods, and the number of trucks that were turned away."""

    @override(KpiCalculator)
    def calculate_kpis(self, episode_event_log: Any, last_maze_state: Any) -> dict[str, float]:
        docked = episode_event_log.query_events(DockEvents.truck_docked)
        away = episode_event_log.query_events(DockEvents.truck_turned_away)
        waited = [event.periods_waited for event in docked]
        return {"mean_wait": float(np.mean(waited)) if waited else 0.0, "turned_away": float(len(away))}


class TruckDocksCoreEnv(CoreEnv):
    """The simulation: a step is a period, in which at most one truck drives to a dock."""

    def __init__(self) -> None:
        super().__init__()
        self.events = Pubsub(self.context.event_service).create_event_topic(DockEvents)
        self.rng = np.random.default_rng()

    @override(CoreEnv)
    def seed(self, seed: Any) -> None:
        self.rng = np.random.default_rng(seed)

    @override(CoreEnv)
    def reset(self) -> dict[str, Any]:
        self.period, self.chosen = 0, NO_TRUCK
        self.kinds, self.waited = np.full(PLACES, -1), np.zeros(PLACES, int)  # by place; -1: empty
        self.free_in = np.zeros(DOCKS, int)
        self._arrivals()
        return self.get_maze_state()

    @override(CoreEnv)
    def step(self, maze_action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if self.chosen == NO_TRUCK:
            self.chosen = int(maze_action["truck"])
            if self.chosen != NO_TRUCK:
                return self.get_maze_state(), 0.0, False, {}
        else:
            dock, truck = int(maze_action["dock"]), self.chosen
            self.events.truck_docked(periods_waited=int(self.waited[truck]))
            self.free_in[dock] = UNLOADING[self.kinds[truck], dock]
            self.kinds[truck], self.waited[truck], self.chosen = -1, 0, NO_TRUCK
        cost = COST[self.kinds].sum()
        self.waited += self.kinds >= 0
        self.free_in = np.maximum(self.free_in - 1, 0)
        self.period += 1
        cost += TURNED_AWAY * self._arrivals()
        return self.get_maze_state(), -float(cost), self.period == PERIODS, {}

    def _arrivals(self) -> int:
        """Let trucks arrive, most of them in the morning and in the afternoon; return how many find no place."""
        n_trucks, n_away = self.rng.poisson(0.55 - 0.25 * math.cos(4 * math.pi * self.period / PERIODS)), 0
        for number in self.rng.random(n_trucks):
            places = np.flatnonzero(self.kinds < 0)
            if len(places):
                self.kinds[places[0]] = 0 if number < 0.5 else 1 if number < 0.8 else 2
            else:
                self.events.truck_turned_away()
                n_away += 1
        return n_away

    @override(CoreEnv)
    def get_maze_state(self) -> dict[str, Any]:
        is_free = self.free_in == 0
        state = {
            "kinds": np.eye(len(KINDS) + 1)[self.kinds, :-1],
            "waited": self.waited / 10,
            "free_in": self.free_in / 8,
            "period": np.array([self.period / PERIODS]),
        }
        if self.chosen == NO_TRUCK:
            can_be_unloaded = (UNLOADING[self.kinds] * is_free).any(axis=1)
            return {**state, "truck_mask": np.append(can_be_unloaded, True)}
        unloading = UNLOADING[self.kinds[self.chosen]]
        return {**state, "unloading": unloading / 8, "dock_mask": (unloading > 0) & is_free}

    @override(CoreEnv)
    def clone_from(self, env: TruckDocksCoreEnv) -> None:  # type: ignore[override]
        self.rng.bit_generator.state = env.rng.bit_generator.state
        self.period, self.chosen = env.period, env.chosen
        self.kinds, self.waited, self.free_in = env.kinds.copy(), env.waited.copy(), env.free_in.copy()

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return ActorID("truck" if self.chosen == NO_TRUCK else "dock", 0)

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[str | int, int]:
        return {"truck": 1, "dock": 1}

    @override(CoreEnv)
    def get_kpi_calculator(self) -> KpiCalculator:
        return DockKpis()

    @override(CoreEnv)
    def get_renderer(self) -> Renderer:
        return DockRenderer()


class DockRenderer(Renderer):
    """Draw how long trucks have waited and docks are still occupied."""

    @override(Renderer)
    def render(self, maze_state: Any, maze_action: Any, events: Any, **kwargs: Any) -> None:
        import matplotlib.pyplot as plt

        _, (places, docks) = plt.subplots(1, 2, num="Truck docks", clear=True, figsize=(7, 2.2), layout="tight")
        colours = [f"C{kind.argmax()}" if kind.any() else "none" for kind in maze_state["kinds"]]
        places.bar(range(PLACES), 10 * maze_state["waited"] + 0.2, color=colours)
        places.set(title="waiting trucks; colours are kinds", ylabel="periods", ylim=(0, 12))
        docks.bar(range(DOCKS), 8 * maze_state["free_in"], color="C7")
        docks.set(title="docks: occupied for", ylabel="periods", ylim=(0, 8), xticks=range(DOCKS))


class TruckDocksEnv(MazeEnv[TruckDocksCoreEnv]):
    """The environment: a sub-step selects a truck, a second one its dock. Masks allow what is possible."""

    def __init__(self) -> None:
        seen = {
            "kinds": spaces.MultiBinary((PLACES, len(KINDS))),
            "waited": spaces.Box(0, 10, (PLACES,)),
            "free_in": spaces.Box(0, 1, (DOCKS,)),
            "period": spaces.Box(0, 1, (1,)),
        }
        docks = {"unloading": spaces.Box(0, 1, (DOCKS,)), "dock_mask": spaces.MultiBinary(DOCKS)}
        super().__init__(
            TruckDocksCoreEnv(),
            action_conversion_dict={
                "truck": DictActionConversion({"truck": spaces.Discrete(PLACES + 1)}),
                "dock": DictActionConversion({"dock": spaces.Discrete(DOCKS)}),
            },
            observation_conversion_dict={
                "truck": DictObservationConversion({**seen, "truck_mask": spaces.MultiBinary(PLACES + 1)}),
                "dock": DictObservationConversion({**seen, **docks}),
            },
        )


class LongestWait(Policy):
    """Unload the truck that has waited longest, at the free dock that unloads it fastest."""

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: Any = None,
        deterministic: bool = False,
    ) -> dict[str, int]:
        if actor_id.step_key == "dock":
            return {"dock": int(np.where(observation["dock_mask"], observation["unloading"], np.inf).argmin())}
        if not observation["truck_mask"][:NO_TRUCK].any():
            return {"truck": NO_TRUCK}
        return {"truck": int(np.where(observation["truck_mask"][:NO_TRUCK], observation["waited"], -1).argmax())}
