"""Event log of an episode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.log_events.step_event_log import StepEventLog


class EpisodeEventLog:
    """All events of one episode, by step.

    :param episode_id: Identity of the episode.
    """

    def __init__(self, episode_id: str) -> None:
        self.episode_id = episode_id
        self.step_event_logs: list[StepEventLog] = []
        """One log per environment step, also for steps without events."""
        self.episode_events = EventCollection()
        """Events of the whole episode, such as its KPIs."""

    def query_events(self, event_spec: Callable[..., object] | Iterable[Callable[..., object]]) -> list[EventRecord]:
        """Return the records of one event of this episode, or of several, in order.

        :param event_spec: The event's interface method, or several of them.
        """
        if not callable(event_spec):
            event_spec = tuple(event_spec)
        found = [record for step in self.step_event_logs for record in step.query_events(event_spec)]
        return found + self.episode_events.query_events(event_spec)

    def timed_events(self) -> Sequence[tuple[int | None, EventRecord]]:
        """Return all events with their environment time; `None` for those of the whole episode."""
        timed: list[tuple[int | None, EventRecord]] = [
            (step.env_time, record) for step in self.step_event_logs for record in step.events
        ]
        return timed + [(None, record) for record in self.episode_events]
