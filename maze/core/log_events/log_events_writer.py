"""Writes event logs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from maze.core.log_events.episode_event_log import EpisodeEventLog


class LogEventsWriter(ABC):
    """Receives the event log of each finished episode.

    An `OSError` switches the writer off with one warning; it never ends a rollout or a training.
    """

    @abstractmethod
    def write(self, episode_event_log: EpisodeEventLog) -> None:
        """Writes the events of one episode."""
