"""The decisions of a server in files, and their replay, bit for bit."""

from __future__ import annotations

import base64
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import CheckpointError, ConfigError, MazeError
from maze.serve.bundle import PolicyBundle, PolicySession

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

    Decisions never wait for a disk. Lines that are not written, since the disk or the queue in front of it is full, are
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
                    self._wake.wait(0.2)  # one write for all lines of 0.2 s
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


# -- replay ------------------------------------------------------------------------------------------------------------


@dataclass
class Replay:
    """What has come of it."""

    n_decisions: int = 0
    """Decisions of networks that were taken again."""
    n_prepared: int = 0
    """Of these, those whose network inputs were made from the observation again: episodes have to be there from their
    beginning for it, where a policy looks back."""
    n_not_by_policy: int = 0
    """Decisions that no network took: refused, of the fallback, repeated actions."""
    n_of_others: int = 0
    """Decisions of bundles that were not given."""
    n_different: int = 0
    first_difference: str = ""
    """Where it is, and what differs."""

    def differs(self, where: str, what: str) -> None:
        """Notes a difference."""
        self.n_different += 1
        self.first_difference = self.first_difference or f"{where}: {what}"

    def summary(self) -> str:
        """For people."""
        text = (
            f"{self.n_decisions} decisions were taken again ({self.n_prepared} of them from the observation on), "
            f"{self.n_different} differ. Not taken again: {self.n_not_by_policy} that no network took, "
            f"{self.n_of_others} of other bundles."
        )
        if self.first_difference:
            text += f"\nThe first difference is at {self.first_difference}"
        return text


def replay(
    path: Path, bundles: Sequence[PolicyBundle], provided: Mapping[str, Callable[..., Any]] | None = None
) -> Replay:
    """Takes the decisions of a log again, in the batches that they were taken in.

    :param path: The log: its directory, or one of its files.
    :param bundles: The policies; decisions of others are counted only.
    :param provided: Code that they ask for.
    :raises CheckpointError: It is no log, or is damaged.
    """
    known = {bundle.sha256: bundle for bundle in bundles}
    result = Replay()
    episodes = _Episodes(provided or {})
    for where, line in read_lines(path):
        try:
            bundle = known.get(line["bundle"])
            if bundle is None:
                result.n_of_others += len(line["rows"])
                continue
            step_key = {str(key): key for key in bundle.steps}[line["step"]]
            if line["kind"] == "decided":
                _decide_again(result, where, line, bundle, step_key, episodes)
            else:
                result.n_not_by_policy += len(line["rows"])
                for row in line["rows"]:
                    episodes.inputs(bundle, step_key, row)
        except CheckpointError:
            raise
        except Exception as error:  # a line may hold anything
            raise CheckpointError(
                f"{where} is no entry of a decision log ({type(error).__name__}: {error})."
            ) from error
    return result


def _decide_again(
    result: Replay,
    where: str,
    line: Mapping[str, Any],
    bundle: PolicyBundle,
    step_key: str | int,
    episodes: _Episodes,
) -> None:
    inputs = {name: decoded(entry) for name, entry in line["inputs"].items()}
    states = {key: decoded(entry) for key, entry in line.get("states", {}).items()}
    generators = [read_rng(row["rng"]) for row in line["rows"] if row["rng"] is not None]
    answer = bundle.act_batch(
        step_key,
        inputs,
        agent_id=line["network_of"],
        deterministic=not generators,
        rngs=generators or None,
        states=states,
    )
    recorded = {head: decoded(entry) for head, entry in line["actions"].items()}
    for index, row in enumerate(line["rows"]):
        result.n_decisions += 1
        for head, expected in recorded.items():
            if not _same_bits(expected[index], answer.actions[head][index]):
                found = answer.actions[head][index]
                result.differs(
                    where, f"decision {row['decision']}, `{head}`: {expected[index]} was decided, now {found}."
                )
                break
        prepared = episodes.inputs(bundle, step_key, row)
        if prepared is None:
            continue
        result.n_prepared += 1
        made, session = prepared
        recorded_inputs = dict(inputs)
        if row["episode"]:  # otherwise the hidden states came with the request
            made, recorded_inputs = {**made, **session.states}, {**inputs, **states}
            session.states = answer.states_of(index)
        for name, array in recorded_inputs.items():
            if not _same_bits(array[index], made[name]):
                result.differs(where, f"decision {row['decision']}: the network's input `{name}` is another one now.")
                break


def _same_bits(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


class _Episodes:
    """The sessions of a log, made again as far as they are there from their beginning."""

    def __init__(self, provided: Mapping[str, Callable[..., Any]]) -> None:
        self._provided = provided
        self._sessions: dict[Any, tuple[PolicySession, int]] = {}

    def inputs(
        self, bundle: PolicyBundle, step_key: str | int, row: Mapping[str, Any]
    ) -> tuple[dict[str, Any], PolicySession] | None:
        """The network's inputs for a row's observation, and the session that made them; None where they are unknown."""
        key = (bundle.sha256, row["episode"], row["is_shadow"])
        n = int(row["n"])
        if row["episode"] == "":
            session = None if bundle.has_memory else bundle.session(provided=self._provided)
        else:
            session, n_known = self._sessions.get(key, (None, 0))
            if n == 0:
                session, n_known = bundle.session(provided=self._provided), 0
            if session is None or n != n_known:
                self._sessions.pop(key, None)
                return None
            self._sessions[key] = (session, n + 1)
        if session is None:
            return None
        try:
            inputs = session.prepare(row["observation"], (step_key, int(row["agent_id"])))
        except MazeError:
            return None
        return None if inputs is None else (inputs, session)
