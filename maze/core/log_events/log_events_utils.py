"""Context for event logging."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from maze.core.log_events.log_events_writer_registry import LogEventsWriterRegistry
from maze.core.log_events.log_events_writer_tsv import LogEventsWriterTSV

if TYPE_CHECKING:
    from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper


class SimpleEventLoggingSetup:
    """Write all events of an environment within a `with` block.

    The last episode is written at the end of the block, finished or not.

    >>> with SimpleEventLoggingSetup(env):  # doctest: +SKIP
    ...     env.reset()

    :param env: The environment.
    :param log_dir: Directory of the files.
    """

    def __init__(self, env: LogStatsWrapper, log_dir: str | Path = Path("./event_logs")) -> None:
        self.env = env
        self._writer = LogEventsWriterTSV(log_dir)

    def __enter__(self) -> SimpleEventLoggingSetup:
        LogEventsWriterRegistry.register_writer(self._writer)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if exc_info[0] is None:
            self.env.publish_episode()
        LogEventsWriterRegistry.writers.remove(self._writer)
