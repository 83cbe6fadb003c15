"""What happened in a sweep so far, as lines of JSON: a sweep that was stopped goes on from here.

Each line is written and synchronised at once; what a kill leaves of a line is cut off when the journal is opened again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from maze.cli.errors import UsageError
from maze.cli.sweeps.trials import SweepRun, SweepTrial
from maze.core.errors import CheckpointError, ConfigError
from maze.core.utils.files import open_json, seal_json

JOURNAL_FILE = "sweep.jsonl"
FORMAT_VERSION = 1


@dataclass
class SweepHistory:
    """The content of a journal.

    :param settings: Of the sweep, as it was started first.
    :param trials: By their number.
    :param order: ("proposed" or "told", trial number) in the order in which it happened.
    """

    settings: dict[str, Any] | None = None
    trials: dict[int, SweepTrial] = field(default_factory=dict)
    order: list[tuple[str, int]] = field(default_factory=list)

    @property
    def told(self) -> set[int]:
        """Numbers of the trials whose result the search knows."""
        return {number for kind, number in self.order if kind == "told"}

    @property
    def runs(self) -> dict[int, SweepRun]:
        return {run.number: run for trial in self.trials.values() for run in trial.runs}

    def add(self, entry: Mapping[str, Any]) -> None:
        """Takes over a line of the journal.

        :raises KeyError: The line is of no kind that the journal has.
        """
        kind = entry["event"]
        if kind == "sweep":
            if self.settings is None:
                self.settings = dict(entry["settings"])
        elif kind == "proposed":
            self.trials[entry["trial"]] = SweepTrial(entry["trial"], dict(entry["params"]))
            self.order.append((kind, entry["trial"]))
        elif kind == "started":
            run = SweepRun(entry["run"], entry["seed"], entry["directory"])
            self.trials[entry["trial"]].runs.append(run)
        elif kind == "ended":
            run = next(run for run in self.trials[entry["trial"]].runs if run.number == entry["run"])
            run.status, run.error = entry["status"], entry["error"]
            run.objective, run.duration, run.directory = entry["objective"], entry["duration"], entry["directory"]
            run.violation, run.minimized = entry.get("violation"), entry.get("minimized", False)
        elif kind == "told":
            self.order.append((kind, entry["trial"]))
        else:
            raise KeyError(kind)


class SweepJournal:
    """The journal of a sweep that runs; nobody else can open it as long as it is open."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / JOURNAL_FILE
        self.history = SweepHistory()
        self._file: IO[bytes] = open(self.path, "a+b", buffering=0)  # noqa: SIM115 (closed with the journal)
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> SweepJournal:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def write(self, event: str, **values: Any) -> None:
        """Adds a line, which is on the disk when this returns.

        :raises OSError: The disk is full, or the file cannot be written.
        """
        entry = {"event": event, **values}
        self.history.add(entry)
        line = seal_json(json.dumps(entry).encode()) + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self.path}: the disk is full; the sweep can be resumed when there is room.")
        os.fsync(self._file.fileno())

    def begin(self, settings: Mapping[str, Any], may_change: Sequence[str]) -> None:
        """Notes the settings of a new sweep, or checks that a resumed one goes on as it was started.

        :param may_change: Names of the settings that a resumed sweep may have another value of.
        :raises UsageError: The resumed sweep was started with other settings.
        """
        plain: dict[str, Any] = json.loads(json.dumps(dict(settings)))
        before = self.history.settings
        if before is not None:
            for name in (name for name in plain if name not in may_change):
                if before.get(name) != plain[name]:
                    raise UsageError(
                        f"hydra.sweep.dir: the sweep in {self.path.parent} was started with another {name}: "
                        f"{_short(before.get(name))}, now {_short(plain[name])}. Resume it with the command it was "
                        "started with (its multirun.yaml has all overrides), or name another directory."
                    )
        self.write("sweep", version=FORMAT_VERSION, settings=plain)

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not a POSIX system
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                f"hydra.sweep.dir: another process runs the sweep in {self.path.parent}. Wait for it to end, or name "
                "another directory."
            ) from error

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read()
        end = content.rfind(b"\n") + 1
        n_read = 0
        try:
            for number, entry in _entries(content[:end], self.path):
                self.history.add(entry)
                n_read = number
        except (KeyError, StopIteration, TypeError) as error:
            raise _damaged(self.path, n_read + 1) from error
        self._file.truncate(end)


def has_journal(directory: Path) -> bool:
    """Whether a sweep was started in this directory that can be resumed."""
    return (directory / JOURNAL_FILE).is_file()


def earlier_settings(directory: Path) -> dict[str, Any] | None:
    """The settings of the sweep that was started in a directory; None: there was none."""
    path = directory / JOURNAL_FILE
    if not path.is_file():
        return None
    line, newline, _ = path.read_bytes().partition(b"\n")
    first = next((entry for _, entry in _entries(line, path)), None) if newline else None
    settings = {} if first is None else first.get("settings", {})
    if not isinstance(settings, dict):
        raise _damaged(path, 1)
    return None if first is None else settings


def _entries(content: bytes, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            entry = json.loads(open_json(line, f"{path}, line {number},").decode())
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number) from error
        if not isinstance(entry, dict):
            raise _damaged(path, number)
        yield number, entry


def _damaged(path: Path, number: int) -> CheckpointError:
    return CheckpointError(
        f"{path}, line {number}: this is no line of a sweep's journal. Remove the lines from there on to go on from "
        "what came before, or start a new sweep in another directory."
    )


def _short(value: Any, length: int = 120) -> str:
    text = json.dumps(value)
    return text if len(text) <= length else f"{text[:length]}..."
