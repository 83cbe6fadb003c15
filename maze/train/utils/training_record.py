"""Progress of a run: a row for each epoch, and a small file beside its checkpoint."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from maze.core.utils.files import read_json_object, write_whole

RECORD_FILE = "run.json"
"""File with the progress of a run, in its directory; it is read without torch and without checkpoints."""

RUNNING, ENDED, INTERRUPTED = "running", "ended", "interrupted"


class EpochSummary(NamedTuple):
    """Summary of an epoch."""

    epoch: int
    """Its number, counted from 1."""
    n_steps: int
    """Environment steps of the run so far, this epoch included; 0 where learning takes none."""
    mean_reward: float
    """Mean reward of the training episodes that ended in it; NaN: none did."""


def write_record(directory: Path, state: str, values: Mapping[str, Any]) -> None:
    """Write the progress of a run atomically; disk errors are ignored.

    :param directory: Directory of the run.
    :param state: `running`, `ended` or `interrupted`.
    :param values: Plain values.
    """
    text = json.dumps({"state": state, **values, "process": os.getpid(), "host": socket.gethostname()}, indent=2)
    with suppress(OSError):
        write_whole(directory / RECORD_FILE, f"{text}\n")


def read_record(directory: Path) -> dict[str, Any] | None:
    """Return the progress of a run; `None`: there is no record. A killed run is `interrupted`.

    :param directory: Directory of the run.
    """
    record = read_json_object(directory / RECORD_FILE)
    if not record:
        return None
    if record.get("state") == RUNNING and record.get("host") == socket.gethostname() and not _is_alive(record):
        record["state"] = INTERRUPTED
    return record


def _is_alive(record: Mapping[str, Any]) -> bool:
    process = record.get("process")
    if not isinstance(process, int) or process <= 0:
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # a process of another user
        return True
    return True
