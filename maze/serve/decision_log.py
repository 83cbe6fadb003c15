"""What a server decided, in files that the bundle replays bit for bit."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import CheckpointError, ConfigError

_LOGGER = logging.getLogger(__name__)

FORMAT = "maze-decisions-1"
_MOST_NUMBERS = 512
"""Larger arrays are written as the base64 of their bytes."""


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An array as plain data from which :func:`decoded` makes the same bits.

    :param array: Any shape; of numbers.
    """
    whole = {"dtype": array.dtype.str, "shape": list(array.shape)}
    if array.size > _MOST_NUMBERS or not np.isfinite(array).all():
        return {**whole, "base64": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}
    return {**whole, "values": array.ravel().tolist()}  # the text of a float is that of exactly this float


def decoded(entry: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """The array that was written, in its shape `[...]`.

    :raises ValueError: The entry describes no array of numbers.
    """
    dtype = np.dtype(str(entry["dtype"]))
    if dtype.kind not in "iufb":
        raise ValueError(f"an array of {dtype} is none of numbers")
    shape = tuple(int(size) for size in entry["shape"])
    if "base64" in entry:
        return np.frombuffer(base64.b64decode(entry["base64"], validate=True), dtype).reshape(shape)
    return np.asarray(entry["values"], dtype).reshape(shape)


class DecisionLog:
    """Writes lines into files that rotate, in a thread of its own.

    Whoever decides never waits for a disk. What is not written, since the disk or the queue in front of it is full, is
    counted, and warned about once.

    :param directory: Where the files go, `decisions-<n>.jsonl`; made if need be.
    :param file_bytes: Size at which another file is begun.
    :param n_files: The oldest beyond this number are deleted.
    :param header: First line of each file, such as versions.
    :param queue_bytes: Most that may wait for the disk.
    """

    def __init__(
        self,
        directory: str | Path,
        header: Mapping[str, Any],
        file_bytes: int = 64 << 20,
        n_files: int = 16,
        queue_bytes: int = 32 << 20,
    ) -> None:
        self.n_lost = 0
        """Lines that were not written: the disk was full or too slow."""
        self._directory = Path(directory)
        self._header = json.dumps({"format": FORMAT, **header}).encode() + b"\n"
        self._file_bytes, self._n_files, self._queue_bytes = file_bytes, n_files, queue_bytes
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The decision log cannot be written into {directory}: {error}.") from error
        self._number = max((_number_of(path) for path in log_files(self._directory)), default=0)
        self._lines: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._file: Any = None
        self._has_warned = False
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="maze-decision-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queues a line.

        :param line: Without its end.
        """
        with self._wake:
            if self._waiting_bytes + len(line) > self._queue_bytes:
                self._lose(1, "the disk is slower than the decisions come")
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)

    def close(self) -> None:
        """Writes what is queued, and ends the thread."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            with self._wake:
                if not self._is_closed:
                    self._wake.wait(0.2)  # nobody is woken for each line: one write for all of 0.2 s
                lines, is_last = list(self._lines), self._is_closed
                self._lines.clear()
                self._waiting_bytes = 0
            if lines:
                self._append(lines)
            if is_last:
                if self._file is not None:
                    self._file.close()
                return

    def _append(self, lines: list[bytes]) -> None:
        begin = 0
        try:
            while begin < len(lines):
                file = self._open()
                room, end = self._file_bytes - file.tell(), begin
                while end < len(lines) and (room > 0 or end == begin):
                    room -= len(lines[end]) + 1
                    end += 1
                before = file.tell()
                try:
                    _write_all(file, b"\n".join(lines[begin:end]) + b"\n")
                except OSError:
                    file.truncate(before)  # no half line stays in front of the next one
                    file.seek(before)
                    raise
                begin = end
        except OSError as error:
            with self._wake:
                self._lose(len(lines) - begin, str(error))

    def _open(self) -> Any:
        if self._file is not None and self._file.tell() < self._file_bytes:
            return self._file
        if self._file is not None:
            self._file.close()
            self._file = None
        path = self._directory / f"decisions-{self._number + 1:06d}.jsonl"
        file = path.open("xb", buffering=0)
        try:
            _write_all(file, self._header)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._file = file
        self._number += 1
        for old in log_files(self._directory)[: -self._n_files]:
            old.unlink(missing_ok=True)
        return file

    def _lose(self, n_lines: int, why: str) -> None:
        self.n_lost += n_lines
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "The decision log in %s is incomplete from now on: %s. Deciding goes on; the metric "
                "maze_decision_log_lost_total counts what is missing, and this is said once.",
                self._directory,
                why,
            )


def _write_all(file: Any, content: bytes) -> None:
    """An unbuffered file that is nearly full takes a part and raises at the next attempt only."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def log_files(path: Path) -> list[Path]:
    """The files of a log, oldest first.

    :param path: Its directory, or one of its files.
    """
    return [path] if path.is_file() else sorted(path.glob("decisions-*.jsonl"), key=_number_of)


def _number_of(path: Path) -> int:
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """All entries of a log with the place of each, `file:line`; the half line of a killed server is passed over.

    :param path: Directory or file.
    :raises CheckpointError: There is no log, or a line in the middle of one is damaged.
    """
    files = log_files(path)
    if not files:
        raise CheckpointError(
            f"{path} is no decision log: it is neither a file nor a directory with decisions-*.jsonl."
        )
    for file in files:
        lines = file.read_bytes().split(b"\n")
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError("not an object")
            except (ValueError, RecursionError) as error:
                if number == len(lines):
                    _LOGGER.warning("%s ends in the middle of line %d; that line is left out.", file, number)
                    continue
                raise CheckpointError(f"{file}:{number} is no entry of a decision log: {error}.") from error
            if number == 1:
                if entry.get("format") != FORMAT:
                    raise CheckpointError(
                        f"{file} is no decision log of this version: its format is {entry.get('format')!r}, expected "
                        f"{FORMAT!r}."
                    )
                continue
            yield f"{file.name}:{number}", entry


def written_rng(rng: np.random.Generator) -> dict[str, Any]:
    """The state of a generator (PCG-64) as JSON, from which :func:`read_rng` makes one that draws the same."""
    state: Any = rng.bit_generator.state
    numbers = state["state"]
    return {
        "state": f"{numbers['state']:x}",
        "inc": f"{numbers['inc']:x}",
        "half": [state["has_uint32"], state["uinteger"]],
    }


def read_rng(written: Mapping[str, Any]) -> np.random.Generator:
    """The generator that was written."""
    bits = np.random.PCG64(0)
    has_half, half = written["half"]
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": int(written["state"], 16), "inc": int(written["inc"], 16)},
        "has_uint32": int(has_half),
        "uinteger": int(half),
    }
    return np.random.Generator(bits)
