"""Registry of writers of event logs."""

from __future__ import annotations

from functools import partial

from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.log_events_writer import LogEventsWriter
from maze.core.log_stats.log_stats import StatsContext, of_active_context


class _ActiveContextView(type):
    """Metaclass whose attribute is that of the active context."""

    writers = of_active_context("event_writers")


class LogEventsWriterRegistry(metaclass=_ActiveContextView):
    """The event log writers of the active statistics context, `writers`, readable and writable."""

    @classmethod
    def register_writer(cls, writer: LogEventsWriter) -> None:
        """Register a writer for the event logs of episodes that begin afterwards.

        :param writer: The writer, which belongs to the active statistics context and is removed at its end.
        """
        StatsContext.active().event_writers.append(writer)

    @classmethod
    def record_event_logs(cls, episode_event_log: EpisodeEventLog) -> None:
        """Pass the log of a finished episode to all writers.

        A writer that raises one of its `failures` (default: `OSError`) is disabled with one warning.

        :param episode_event_log: The log.
        """
        context = StatsContext.active()
        for writer in context.event_writers:
            context.guarded(writer, partial(writer.write, episode_event_log))
