"""A small recorded episode, and what draws it."""

from __future__ import annotations

from abc import ABC

from maze.core.env.base_env_events import BaseEnvEvents
from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer
from maze.core.trajectory_recording.records.state_record import StateRecord
from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord


class CutEvents(ABC):
    def cut(self, piece: str, size: int) -> None:
        """A piece was cut."""


class CountRenderer(Renderer):
    """Draws as the documentation's renderer does, with pyplot and a pause that a window needs."""

    def render(self, maze_state, maze_action, events, **kwargs):
        import matplotlib.pyplot as plt

        plt.figure("Counting", figsize=(3, 2))
        plt.clf()
        plt.subplot(111)
        plt.bar([0, 1], [maze_state["count"], 3])
        plt.title("end" if maze_action is None else f"move {maze_action['move']}")
        plt.draw()
        plt.pause(60)


def reward(value: float) -> EventRecord:
    return EventRecord(BaseEnvEvents, BaseEnvEvents.reward, {"value": value})


def cut(piece: str, size: int) -> EventRecord:
    return EventRecord(CutEvents, CutEvents.cut, {"piece": piece, "size": size})


def cut_events() -> list[StepEventLog]:
    """Three steps: rewards 1, 2, 3; two cuts in the first step, one in the last."""
    events = [
        [reward(1.0), cut("a", 4), cut("b", 1)],
        [reward(2.0)],
        [reward(3.0), cut("a", 2)],
    ]
    return [StepEventLog(env_time, EventCollection(records)) for env_time, records in enumerate(events)]


def episode(renderer: Renderer | None = None, info: dict | None = None) -> StateTrajectoryRecord:
    """Three steps and the last state."""
    record = StateTrajectoryRecord("an episode", renderer=renderer)
    for env_time, events in enumerate(cut_events()):
        is_last = env_time == 2
        state = {"count": env_time}
        record.append(
            StateRecord(
                state, {"move": env_time + 5}, events, env_time + 1.0, is_last, (info or {}) if is_last else {}, {}
            )
        )
    record.append(StateRecord({"count": 3}, None, StepEventLog(3), None, None, None, {}))
    return record


def is_png(data: bytes) -> bool:
    return bytes(data[:8]) == b"\x89PNG\r\n\x1a\n"
