"""Event logs as tables of tab-separated values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.annotations import override
from maze.core.log_events.episode_event_log import EpisodeEventLog
from maze.core.log_events.log_events_writer import LogEventsWriter


class EventRow(NamedTuple):
    """One row of an event table.

    :param episode_id: The episode.
    :param env_time: The environment step; `None` for events of the whole episode.
    :param attributes: The event's attributes, one column each.
    """

    episode_id: str
    env_time: int | None
    attributes: dict[str, Any]


def event_tables(episode_event_log: EpisodeEventLog) -> dict[str, list[EventRow]]:
    """Return the rows of each event's table, by interface and event."""
    tables: dict[str, list[EventRow]] = {}
    for env_time, record in episode_event_log.timed_events():
        row = EventRow(episode_event_log.episode_id, env_time, record.attributes)
        tables.setdefault(record.qualified_name, []).append(row)
    return tables


class LogEventsWriterTSV(LogEventsWriter):
    """Write one file per event, `<Interface>.<event>.tsv`, with a row for each fired event.

    Columns are the episode, the environment step and the event's attributes (arrays as lists), as tab-separated values
    with a header.
    Existing files are appended to.

    :param log_dir: Directory of the files; created when the first episode is written.
    """

    def __init__(self, log_dir: str | Path = Path("./event_logs")) -> None:
        self.log_dir = Path(log_dir)

    @override(LogEventsWriter)
    def write(self, episode_event_log: EpisodeEventLog) -> None:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        for name, rows in event_tables(episode_event_log).items():
            # Opened per episode, so that each episode is complete on disk.
            with (self.log_dir / f"{name}.tsv").open("a", encoding="utf-8", newline="") as stream:
                writer = csv.writer(stream, delimiter="\t", lineterminator="\n")
                if stream.tell() == 0:
                    writer.writerow([*EventRow._fields[:2], *rows[0].attributes])
                writer.writerows([row.episode_id, row.env_time, *map(_cell, row.attributes.values())] for row in rows)


def _cell(value: Any) -> Any:
    """Return an array as a list: the text of a large array leaves out most numbers."""
    return value.tolist() if isinstance(value, np.ndarray) else value
