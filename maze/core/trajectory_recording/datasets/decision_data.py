"""Decision logs of servers as logged episodes: decisions joined with their reported outcomes.

A log is a directory of files `decisions-<n>.jsonl`. :mod:`maze.serve.decision_log` writes them.
"""

from __future__ import annotations

import base64
import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.structured_env import ActorID, StepKeyType, has_agent
from maze.core.errors import CheckpointError, ConfigError
from maze.core.trajectory_recording.records.spaces_record import ACTED_BY, PROPENSITY, SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv

_LOGGER = logging.getLogger(__name__)

FORMAT = "maze-decisions-1"
# Larger arrays are written in base64.
_MOST_NUMBERS = 512


def encoded(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Encode an array as plain data, from which :func:`decoded` restores the same bits.

    :param array: Numbers in any shape.
    """
    whole = {"dtype": array.dtype.str, "shape": list(array.shape)}
    if array.size > _MOST_NUMBERS or not np.isfinite(array).all():
        return {**whole, "base64": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()}
    return {**whole, "values": array.ravel().tolist()}  # the shortest text of a float restores its bits


def decoded(entry: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Return the encoded array, in its shape.

    :param entry: Result of :func:`encoded`.
    :raises ValueError: The entry describes no array of numbers.
    :raises KeyError: A part of the entry is missing.
    """
    dtype, shape = np.dtype(str(entry["dtype"])), [int(size) for size in entry["shape"]]
    if dtype.kind not in "iufb" or min(shape, default=0) < 0:
        raise ValueError(f"an array of {dtype} with the shape {shape} does not hold numbers")
    if "base64" in entry:
        return np.frombuffer(base64.b64decode(entry["base64"], validate=True), dtype).reshape(shape)
    return np.asarray(entry["values"], dtype).reshape(shape)


def log_files(path: Path) -> list[Path]:
    """Return the files of a log, oldest first.

    :param path: Its directory, or one of its files.
    """
    return [path] if path.is_file() else sorted(path.glob("decisions-*.jsonl"), key=number_of)


def number_of(path: Path) -> int:
    """Return the number in the name of a file of a log.

    :param path: The file, such as `decisions-12.jsonl`; 0 for a name without a number.
    """
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def read_lines(path: Path, damaged: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Read all entries of a log with their places, `file:line`; skip the half line of a killed server.

    :param path: Directory or file.
    :param damaged: Gets the places of damaged lines, which are skipped; `None`: they raise.
    :raises CheckpointError: There is no log, or a line in the middle of one is damaged.
    """
    files = log_files(path)
    if not files:
        raise CheckpointError(
            f"{path} is not a decision log: it is neither a file nor a directory with decisions-*.jsonl."
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
                    _LOGGER.warning("%s ends in the middle of line %d, which is skipped.", file, number)
                    continue
                if damaged is not None and number > 1:
                    damaged.append(f"{file.name}:{number}")
                    continue
                raise CheckpointError(f"{file}:{number} is not an entry of a decision log: {error}.") from error
            if number == 1:
                if entry.get("format") != FORMAT:
                    raise CheckpointError(
                        f"{file} is not a decision log of this version: expected the format {FORMAT!r}, found "
                        f"{entry.get('format')!r}."
                    )
                continue
            yield f"{file.name}:{number}", entry


@dataclass
class JoinedLog:
    """Episodes of a decision log.

    :param episodes: Complete episodes: records of observations, actions and rewards, with probabilities in `info`.
    :param left_out: Why decisions are not part of them, with their number.
    """

    episodes: list[SpacesTrajectoryRecord]
    left_out: Counter[str] = field(default_factory=Counter)

    def summary(self) -> str:
        """Describe the joined and the omitted entries in one line."""
        n = sum(len(step.substep_records) for episode in self.episodes for step in episode.step_records)
        missing = "; ".join(f"{count} {why}" for why, count in sorted(self.left_out.items()))
        return f"{n} decisions in {len(self.episodes)} episodes; left out: {missing or 'none'}."


@dataclass
class _Decision:
    where: str
    n: int
    time: float
    record: SpacesRecord
    reason: str = ""
    """Why it cannot be learned from; empty: it can."""


def is_decision_log(path: str | Path) -> bool:
    """Return whether a path is a decision log, by its name; the content is not read.

    :param path: A file with the suffix `.jsonl`, or a directory with files `decisions-*.jsonl`.
    """
    path = Path(path)
    return path.suffix == ".jsonl" or (path.is_dir() and bool(log_files(path)))


def read_decisions(path: str | Path, env: MazeEnv[Any] | None = None) -> list[SpacesTrajectoryRecord]:
    """Read the complete episodes of a decision log; log a warning about omitted entries.

    :param path: Directory of the log, or one of its files.
    :param env: The environment, for its sub-step keys.
    :raises CheckpointError: There is no log.
    :raises ConfigError: No episode is complete.
    """
    joined = join_decision_log(path, env)
    if not joined.episodes:
        raise ConfigError(f"{path}: the decision log holds no complete episode: {joined.summary()}")
    _LOGGER.log(logging.WARNING if joined.left_out else logging.INFO, "%s: %s", path, joined.summary())
    return joined.episodes


def join_decision_log(path: str | Path, env: MazeEnv[Any] | None = None) -> JoinedLog:
    """Join the decisions of a log with their outcomes.

    Observations are the inputs of the networks, after all wrappers. A decision without an outcome, without a
    network (refused, of the fallback), on a damaged line, of an unknown agent, after the end of its episode, with
    values outside of the spaces or with contradicting outcomes leaves its episode incomplete; incomplete episodes are
    counted and left out. A repeated outcome counts once. Decisions of shadows and of no episode are left out.

    :param path: Directory of the log, or one of its files.
    :param env: The environment, for its spaces, agents and sub-step keys, as logs have text only; `None`: nothing is
        compared with them, and whole numbers become integers.
    :raises CheckpointError: There is no log.
    """
    damaged: list[str] = []
    seen, taken = ({}, {}) if env is None else (env.observation_spaces_dict, env.action_spaces_dict)
    counts = {} if env is None else env.agent_counts_dict
    known_spaces = {str(key): (key, seen[key].spaces, space.spaces, counts[key]) for key, space in taken.items()}
    decisions: dict[str, dict[str, _Decision]] = {}
    outcomes: dict[str, tuple[str, dict[str, Any]]] = {}  # with their places
    contradicted: set[str] = set()
    left_out: Counter[str] = Counter()
    for where, line in read_lines(Path(path), damaged):
        try:
            is_outcome = line["kind"] == "outcome"
            found = [] if is_outcome else _decisions(where, line, known_spaces)
            identifier, values = _outcome(line) if is_outcome else ("", {})
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            _LOGGER.warning("%s is not an entry of a decision log (%s: %s).", where, type(error).__name__, error)
            damaged.append(where)
            continue
        for name, number, decision in found:
            if name:
                decisions.setdefault(name, {})[number] = decision
            else:
                left_out["of no episode"] += 1
        if identifier:
            first, before = outcomes.setdefault(identifier, (where, values))
            if before != values:
                contradicted.add(identifier)
                message = "%s: the outcome of decision %s contradicts that of %s. Its episode is left out."
                _LOGGER.warning(message, where, identifier, first)
    if damaged:
        _LOGGER.warning("Damaged lines of the decision log are skipped: %s", ", ".join(damaged[:10]))
        left_out["lines damaged"] = len(damaged)
    known = {identifier for episode in decisions.values() for identifier in episode}
    unknown = [where for identifier, (where, _) in outcomes.items() if identifier not in known]
    if unknown:
        _LOGGER.warning("Outcomes of decisions that the log does not contain: %s", ", ".join(unknown[:10]))
        left_out["outcomes of unknown decisions"] = len(unknown)
    episodes = []
    for name, episode in decisions.items():
        steps, reason = _joined(episode, outcomes, contradicted)
        if reason:
            left_out[reason] += len(episode)
            continue
        trajectory = SpacesTrajectoryRecord(name)
        trajectory.step_records = steps
        episodes.append(trajectory)
    return JoinedLog(episodes, +left_out)


def _outcome(line: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the identifier of a decision, and its reported outcome."""
    values = {key: value for key, value in line.items() if key not in ("kind", "time", "decision")}
    float(values["reward"])
    for name in ("done", "truncated"):
        if values.get(name) not in (None, False, True):
            raise ValueError(f"`{name}`: expected true or false, found {values[name]!r:.100}")
    return str(line["decision"]), values


def _decisions(
    where: str, line: Mapping[str, Any], known_spaces: Mapping[str, tuple[StepKeyType, Any, Any, int]]
) -> list[tuple[str, str, _Decision]]:
    """Return the episode, identifier and decision of each row of a line."""
    text = str(line["step"])
    key, seen, taken, n_agents = known_spaces.get(text, (int(text) if text.isdecimal() else text, {}, {}, -1))
    is_decided = line["kind"] == "decided"
    inputs = {name: decoded(array) for name, array in line["inputs"].items()} if is_decided else {}
    actions = {name: decoded(array) for name, array in line["actions"].items()} if is_decided else {}
    probabilities = line.get("probabilities") or {}
    agents = [int(row["agent_id"]) for row in line["rows"]]
    unknown = np.array([not has_agent(n_agents, agent) for agent in agents], np.bool_)
    outside = np.zeros_like(unknown)
    if known_spaces:
        from maze.core.env.space_values import rows_outside  # needs gymnasium, which servers do without

        for columns, spaces in ((inputs, seen), (actions, taken)):
            for name, array in columns.items():
                if name in spaces and array.shape == (len(outside), *spaces[name].shape):
                    outside |= rows_outside(array, spaces[name])
    problems = {"values outside of their spaces": outside, "unknown agents": unknown}
    for problem in (each for each, is_there in problems.items() if is_there.any()):
        _LOGGER.warning("%s: %s. The episodes of these decisions are left out.", where, problem)
    found = []
    for index, row in enumerate(line["rows"]):
        if row["is_shadow"]:
            continue
        certain = {head for head, array in actions.items() if array.dtype.kind == "f"}  # 1.0 is no density
        stated = [(head, probabilities[head][index]) for head in actions if probabilities.get(head)]
        known = [value for head, value in stated if head not in certain or value != 1.0]
        propensity = float(np.prod(known)) if known and len(known) == len(actions) else np.nan
        if propensity <= 0:
            raise ValueError(f"expected positive probabilities, found {known}")
        record = SpacesRecord(
            ActorID(key, agents[index]),
            observation={name: array[index] for name, array in inputs.items()},
            action={name: array[index] for name, array in actions.items()},
            info={PROPENSITY: propensity, ACTED_BY: str(line.get("policy", ""))},
        )
        undecided = "" if is_decided else f"not decided by a network ({line['kind']})"
        reason = next((f"in episodes with {each}" for each, rows in problems.items() if rows[index]), undecided)
        decision = _Decision(where, int(row["n"]), float(line["time"]), record, reason)
        found.append((row["episode"] or row.get("client_episode", ""), str(row["decision"]), decision))
    return found


def _joined(
    episode: Mapping[str, _Decision], outcomes: Mapping[str, tuple[str, Mapping[str, Any]]], contradicted: Set[str]
) -> tuple[list[StructuredSpacesRecord], str]:
    """Return the steps of an episode with their rewards, and why it is incomplete; empty: it is complete."""
    ordered = sorted(episode.items(), key=lambda item: item[1].n)
    numbers = [decision.n for _, decision in ordered]
    reason = next((decision.reason for _, decision in ordered if decision.reason), "")
    if numbers != list(range(len(numbers))):
        reason = reason or "in episodes with missing or repeated numbers"
    if not episode.keys() <= outcomes.keys():
        reason = reason or "in episodes with decisions without outcome"
    if not contradicted.isdisjoint(episode):
        reason = reason or "in episodes with contradicting outcomes"
    for (_, earlier), (_, later) in pairwise(ordered):
        if later.time < earlier.time:
            _LOGGER.warning("%s: the clock ran backwards; decisions are ordered by their number.", later.where)
    steps: list[StructuredSpacesRecord] = []
    seen, is_over = set[ActorID](), False
    for identifier, decision in () if reason else ordered:
        outcome, record = outcomes[identifier][1], decision.record
        if not steps or record.actor_id in seen:
            if is_over:
                reason = "in episodes that continue after their end"
                _LOGGER.warning("%s: the step before was reported as the last one; reset the session.", decision.where)
            steps.append(StructuredSpacesRecord())
            seen = set()
        seen.add(record.actor_id)
        record.reward, is_over = float(outcome["reward"]), bool(outcome.get("done"))
        record.done = is_over or bool(outcome.get("truncated"))
        record.info[TRUNCATION_KEY] = bool(outcome.get("truncated"))
        steps[-1].append(record)
    return steps, reason
