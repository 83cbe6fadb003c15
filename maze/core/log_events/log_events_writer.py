"""Interface of writers of event logs."""

from __future__ import annotations

from abc import ABC, abstractmethod

from maze.core.log_events.episode_event_log import EpisodeEventLog


class LogEventsWriter(ABC):
    """Writer of the event log of each finished episode.

    After an `OSError` the writer is disabled with one warning; the rollout or training run continues.
    """

    @abstractmethod
    def write(self, episode_event_log: EpisodeEventLog) -> None:
        """Write the events of one episode.

        :param episode_event_log: The events. Other writers receive the same object, so it must not be modified.
        """
