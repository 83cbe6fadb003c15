"""What a training says about itself while it runs: a row for each epoch, and a small file beside its checkpoint."""

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
"""Where a run says how far it is, in its directory; it is read without torch and without its checkpoints."""

RUNNING, ENDED, INTERRUPTED = "running", "ended", "interrupted"


class EpochSummary(NamedTuple):
    """What is left of an epoch."""

    epoch: int
    """Its number, counted from 1."""
    n_steps: int
    """Environment steps of the training so far, this epoch included; 0 where learning takes none."""
    mean_reward: float
    """Mean reward of the training's episodes that ended in it; NaN: none did."""


def write_record(directory: Path, state: str, values: Mapping[str, Any]) -> None:
    """Writes how far a training is, whole or not at all; a disk that does not take it stops no training.

    :param directory: Directory of the run.
    :param state: `running`, `ended` or `interrupted`.
    :param values: Plain values.
    """
    text = json.dumps({"state": state, **values, "process": os.getpid(), "host": socket.gethostname()}, indent=2)
    with suppress(OSError):
        write_whole(directory / RECORD_FILE, f"{text}\n")


def read_record(directory: Path) -> dict[str, Any] | None:
    """How far a training is; `None`: nothing is written down. One that was killed is `interrupted`.

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
    except OSError:  # somebody else's
        return True
    return True
