"""Draws the house."""

from __future__ import annotations

from typing import Any

from maze.core.annotations import override
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer

from .state import BatteryCommand, HouseState


class HouseRenderer(Renderer):
    """Bars for battery, price, sun and demand.

    :param capacity: Of the battery in kWh.
    """

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity

    @override(Renderer)
    def render(
        self, maze_state: HouseState, maze_action: BatteryCommand | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        import matplotlib.pyplot as plt

        plt.figure("House", figsize=(5, 3))
        plt.clf()
        values = {
            f"battery ({maze_state.charge:.1f} kWh)": maze_state.charge / self.capacity,
            f"price ({maze_state.price:.2f} EUR)": maze_state.price / 0.6,
            f"sun ({maze_state.solar:.1f} kWh)": maze_state.solar / 4.0,
            f"demand ({maze_state.demand:.1f} kWh)": maze_state.demand / 2.0,
        }
        plt.barh(list(values), list(values.values()), color=["tab:green", "tab:red", "gold", "tab:blue"])
        plt.xlim(0.0, 1.0)
        order = "" if maze_action is None else f", ordered {maze_action.energy:+.1f} kWh"
        plt.title(f"day {maze_state.hour // 24 + 1}, {maze_state.hour % 24:02d}:00{order}")
        plt.tight_layout()
        plt.draw()
        plt.pause(0.01)
