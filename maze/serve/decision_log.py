"""The decision log of a server: rotating files, and their bitwise replay."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import CheckpointError, ConfigError, MazeError
from maze.core.trajectory_recording.datasets.decision_data import FORMAT, decoded, log_files, number_of, read_lines
from maze.core.utils.seeding import generator_state, set_generator_state
from maze.serve.bundle import PolicyBundle, PolicySession
from maze.serve.pipeline import Provided, needed_code

_LOGGER = logging.getLogger(__name__)


class DecisionLog:
    """Write lines to rotating files, in a thread.

    Decisions never wait for a disk. Lines that cannot be written, because the disk or the queue is full, are counted,
    and logged once.

    :param directory: Directory of the files `decisions-<n>.jsonl`; created if necessary.
    :param file_bytes: Size at which the next file begins.
    :param n_files: Maximum number of files; the oldest ones are deleted.
    :param header: First line of each file, such as versions.
    :param queue_bytes: Maximum size of the queue.
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
        """Lines that could not be written: the disk was full or too slow."""
        self._directory = Path(directory)
        self._header = json.dumps({"format": FORMAT, **header}).encode() + b"\n"
        self._file_bytes, self._n_files, self._queue_bytes = file_bytes, n_files, queue_bytes
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"The decision log cannot be written to {directory}: {error}.") from error
        if not os.access(self._directory, os.W_OK):
            raise ConfigError(f"The decision log cannot be written to {directory}: the directory is not writable.")
        self._number = max((number_of(path) for path in log_files(self._directory)), default=0)
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._file: Any = None
        self._lock, self._closed = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="maze-decision-log", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queue a line.

        :param line: The line without its end.
        """
        with self._lock:
            if self._waiting_bytes + len(line) > self._queue_bytes:
                self._lose(1, "the disk is slower than the decisions")
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)

    def close(self) -> None:
        """Write the queue, and end the thread."""
        self._closed.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closed.wait(0.2)  # lines of 0.2 s are written together
            with self._lock:
                lines, self._lines, self._waiting_bytes = self._lines, [], 0
            try:
                while lines:
                    lines = lines[self._append(lines) :]
            except OSError as error:
                with self._lock:
                    self._lose(len(lines), str(error))
        if self._file is not None:
            self._file.close()

    def _append(self, lines: list[bytes]) -> int:
        """Write the lines that the file has room for, at least one; return their number."""
        file = self._open()
        before, n_lines = file.tell(), 0
        room = self._file_bytes - before
        while n_lines < len(lines) and (room > 0 or not n_lines):
            room -= len(lines[n_lines]) + 1
            n_lines += 1
        try:
            _write_all(file, b"\n".join([*lines[:n_lines], b""]))
        except OSError:
            file.truncate(before)  # no half line precedes the next one
            file.seek(before)
            raise
        return n_lines

    def _open(self) -> Any:
        if self._file is not None and self._file.tell() < self._file_bytes:
            return self._file
        if self._file is not None:
            self._file.close()
            self._file = None
        self._number += 1
        path = self._directory / f"decisions-{self._number:06d}.jsonl"
        self._directory.mkdir(parents=True, exist_ok=True)  # it may have been moved
        try:
            file = path.open("xb", buffering=0)
        except FileExistsError:  # of another server with the same directory, such as one that is still draining
            return self._open()
        try:
            _write_all(file, self._header)
        except OSError:
            file.close()
            path.unlink(missing_ok=True)
            raise
        self._file = file
        for old in log_files(self._directory)[: -self._n_files]:
            old.unlink(missing_ok=True)
        return file

    def _lose(self, n_lines: int, why: str) -> None:
        if not self.n_lost:
            _LOGGER.warning(
                "The decision log in %s is incomplete from now on: %s. Decisions continue; the metric "
                "maze_decision_log_lost_total counts the missing lines. This warning is logged once.",
                self._directory,
                why,
            )
        self.n_lost += n_lines


def _write_all(file: Any, content: bytes) -> None:
    """Write to an unbuffered file; one that is nearly full accepts a part, and raises at the next attempt only."""
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def written_rng(rng: np.random.Generator) -> dict[str, str]:
    """Return the state of a generator (PCG-64) as hexadecimal numbers: JSON has none of 128 bits."""
    return {name: f"{word:x}" for name, word in generator_state(rng).items()}


def read_rng(written: Mapping[str, Any]) -> np.random.Generator:
    """Return a generator in a written state."""
    rng = np.random.default_rng(0)
    set_generator_state(rng, {name: int(word, 16) for name, word in written.items()})
    return rng


# -- replay ------------------------------------------------------------------------------------------------------------


class Replay:
    """Repeat the decisions of a log, and compare.

    :param provided: Code that bundles need.
    """

    def __init__(self, provided: Provided) -> None:
        self._provided = provided
        # the sessions of the log, as far as it has them from their beginning
        self._sessions: dict[Any, tuple[PolicySession, int]] = {}
        self.n_decisions = 0  # of networks that were repeated
        # Those whose network inputs were computed from the observation again. A policy that looks back needs the log
        # of the whole episode for it.
        self.n_prepared = 0
        self.n_not_by_policy = 0  # refused, of the fallback, repeated actions
        self.n_of_others = 0  # of bundles that were not passed
        self.n_different = 0
        self.first_difference = ""

    def _differs(self, where: str, what: str) -> None:
        self.n_different += 1
        self.first_difference = self.first_difference or f"{where}: {what}"

    def summary(self) -> str:
        """Describe the result in text."""
        text = (
            f"{self.n_decisions} decisions were repeated ({self.n_prepared} of them from the observation on), "
            f"{self.n_different} differ. Not repeated: {self.n_not_by_policy} without a network, "
            f"{self.n_of_others} of other bundles."
        )
        if self.first_difference:
            text += f"\nThe first difference is at {self.first_difference}"
        return text

    def repeat(self, where: str, line: Mapping[str, Any], bundle: PolicyBundle, step_key: str | int) -> None:
        """Repeat the decisions of a line.

        :param where: The line in messages.
        :param line: Content of the line.
        :param bundle: The policy.
        :param step_key: The sub-step.
        """
        inputs, states, actions = (
            {name: decoded(array) for name, array in line.get(part, {}).items()}
            for part in ("inputs", "states", "actions")
        )
        rngs = [read_rng(row["rng"]) for row in line["rows"] if row["rng"] is not None]
        answer = bundle.act_batch(
            step_key, inputs, agent_id=line["network_of"], deterministic=not rngs, rngs=rngs or None, states=states
        )
        explored = line.get("explored") or [False] * len(line["rows"])
        for index, row in enumerate(line["rows"]):
            self.n_decisions += 1
            place = f"decision {row['decision']}"
            for head, expected in actions.items():
                found = answer.actions[head][index]
                if not explored[index] and not _same_bits(expected[index], found):
                    self._differs(where, f"{place}, `{head}`: the log has {expected[index]}, the replay {found}.")
                    break
            prepared = self.inputs(bundle, step_key, row)
            if prepared is None:
                continue
            self.n_prepared += 1
            computed, session = prepared
            logged = dict(inputs)
            if row["episode"]:  # otherwise the request has carried the hidden states
                computed, logged = {**computed, **session.states}, {**inputs, **states}
                session.states = answer.states_of(index)
            for name, array in logged.items():
                if not _same_bits(array[index], computed[name]):
                    self._differs(where, f"{place}: the network's input `{name}` differs.")
                    break

    def inputs(
        self, bundle: PolicyBundle, step_key: str | int, row: Mapping[str, Any]
    ) -> tuple[dict[str, Any], PolicySession] | None:
        """Return the network inputs for a row's observation, and their session; None where they cannot be computed."""
        key, n = (bundle.sha256, row["episode"], row["is_shadow"]), int(row["n"])
        if row["episode"] == "":
            session = None if bundle.has_memory else self._session(bundle)
        else:
            session, n_known = self._sessions.pop(key, (None, 0))
            if n == 0:
                session, n_known = self._session(bundle), 0
            if session is not None and n == n_known:
                self._sessions[key] = (session, n + 1)
            else:
                session = None
        if session is None:
            return None
        try:
            inputs = session.prepare(row["observation"], (step_key, int(row["agent_id"])))
        except MazeError:
            return None
        return None if inputs is None else (inputs, session)

    def _session(self, bundle: PolicyBundle) -> PolicySession:
        return bundle.session(provided=needed_code(bundle.card["code"], self._provided))


def _same_bits(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def replay(path: Path, bundles: Sequence[PolicyBundle], provided: Provided | None = None) -> Replay:
    """Repeat the decisions of a log, in the same batches.

    :param path: The log: its directory, or one of its files.
    :param bundles: The policies; decisions of others are counted only.
    :param provided: Code that they need.
    :raises CheckpointError: There is no log, or it is damaged.
    """
    known = {bundle.sha256: bundle for bundle in bundles}
    result = Replay(provided or {})
    for where, line in read_lines(path):
        if line.get("kind") == "outcome":
            continue
        try:
            bundle = known.get(line["bundle"])
            if bundle is None:
                result.n_of_others += len(line["rows"])
                continue
            step_key = {str(key): key for key in bundle.steps}[line["step"]]
            if line["kind"] == "decided":
                result.repeat(where, line, bundle, step_key)
            else:
                result.n_not_by_policy += len(line["rows"])
                for row in line["rows"]:
                    result.inputs(bundle, step_key, row)
        except Exception as error:  # a line may hold anything
            raise CheckpointError(f"{where} is not an entry of a decision log ({error!r}).") from error
    return result
