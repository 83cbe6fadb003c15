"""Decision logs of servers as logged episodes: decisions joined with their reported outcomes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.env.base_env import TRUNCATION_KEY
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import CheckpointError, ConfigError
from maze.core.trajectory_recording.datasets.logged_steps import PROPENSITY, LoggedSteps
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.serve.bundle_file import decoded
from maze.serve.decision_log import log_files, read_lines

_LOGGER = logging.getLogger(__name__)


@dataclass
class JoinedLog:
    """Episodes of a decision log.

    :param episodes: For each complete episode the number of the environment step and the record of each decision.
    :param left_out: Why decisions are not part of them, with their number.
    """

    episodes: list[list[tuple[int, SpacesRecord]]]
    left_out: Counter[str] = field(default_factory=Counter)

    def steps(self) -> LoggedSteps:
        """Return the decisions as columns.

        :raises ConfigError: No episode is complete.
        """
        if not self.episodes:
            raise ConfigError(f"The decision log holds no complete episode: {self.summary()}")
        return LoggedSteps.of_episodes(self.episodes)

    def summary(self) -> str:
        """Describe in one line what was joined and what was left out."""
        n = sum(map(len, self.episodes))
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
    """Return whether a path is a decision log."""
    path = Path(path)
    return path.suffix == ".jsonl" or (path.is_dir() and bool(log_files(path)))


def join_decision_log(path: str | Path, step_keys: Mapping[str, StepKeyType] | None = None) -> JoinedLog:
    """Join the decisions of a log with their outcomes.

    Observations are the inputs of the networks, after all wrappers. A decision without an outcome, without a network
    (refused, of the fallback) or on a damaged line leaves its episode incomplete; incomplete episodes are counted and
    left out. A repeated outcome counts once. Decisions of shadows and of no episode are left out.

    :param path: Directory of the log, or one of its files.
    :param step_keys: Sub-step keys by their text, as logs have text only; `None`: whole numbers become integers.
    :raises CheckpointError: There is no log, or two outcomes of one decision contradict each other.
    """
    damaged: list[str] = []
    decisions: dict[str, dict[str, _Decision]] = {}
    outcomes: dict[str, tuple[str, dict[str, Any]]] = {}
    left_out: Counter[str] = Counter()
    for where, line in read_lines(Path(path), damaged):
        try:
            found = [] if line["kind"] == "outcome" else _decisions(where, line, step_keys)
            outcome = None if found else _outcome(line)
        except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
            _LOGGER.warning("%s is no entry of a decision log (%s: %s).", where, type(error).__name__, error)
            damaged.append(where)
            continue
        for name, identifier, decision in found:
            if name:
                decisions.setdefault(name, {})[identifier] = decision
            else:
                left_out["of no episode"] += 1
        if outcome is not None:
            _add_outcome(outcomes, where, *outcome)
    if damaged:
        _LOGGER.warning("Damaged lines of the decision log are skipped: %s", ", ".join(damaged[:10]))
        left_out["lines damaged"] = len(damaged)
    known = {identifier for episode in decisions.values() for identifier in episode}
    left_out["outcomes of unknown decisions"] = len(outcomes.keys() - known)
    episodes = []
    for episode in decisions.values():
        joined = _joined(episode, outcomes, left_out)
        if joined:
            episodes.append(joined)
    return JoinedLog(episodes, +left_out)


def _outcome(line: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    if line["kind"] != "outcome":
        return None
    values = {key: value for key, value in line.items() if key not in ("kind", "time", "decision")}
    float(values["reward"])
    return str(line["decision"]), values


def _add_outcome(
    outcomes: dict[str, tuple[str, dict[str, Any]]], where: str, identifier: str, outcome: dict[str, Any]
) -> None:
    before = outcomes.setdefault(identifier, (where, outcome))
    if before[1] != outcome:
        raise CheckpointError(
            f"{where}: the outcome {outcome} of decision {identifier} contradicts that of {before[0]}, {before[1]}. "
            f"Remove one of the lines."
        )


def _decisions(
    where: str, line: Mapping[str, Any], step_keys: Mapping[str, StepKeyType] | None
) -> list[tuple[str, str, _Decision]]:
    """Episode, identifier and decision of each row of a line."""
    text = str(line["step"])
    key = (int(text) if text.isdecimal() else text) if step_keys is None else step_keys[text]
    is_decided = line["kind"] == "decided"
    inputs = {name: decoded(array) for name, array in line["inputs"].items()} if is_decided else {}
    actions = {name: decoded(array) for name, array in line["actions"].items()} if is_decided else {}
    probabilities = line.get("probabilities") or {}
    found = []
    for index, row in enumerate(line["rows"]):
        if row["is_shadow"]:
            continue
        known = [probabilities[head][index] for head in actions if probabilities.get(head)]
        propensity = float(np.prod(known)) if known and len(known) == len(actions) else np.nan
        record = SpacesRecord(
            ActorID(key, int(row["agent_id"])),
            observation={name: array[index] for name, array in inputs.items()},
            action={name: array[index] for name, array in actions.items()},
            info={PROPENSITY: propensity},
        )
        reason = "" if is_decided else f"not decided by a network ({line['kind']})"
        decision = _Decision(where, int(row["n"]), float(line["time"]), record, reason)
        found.append((row["episode"] or row.get("client_episode", ""), str(row["decision"]), decision))
    return found


def _joined(
    episode: Mapping[str, _Decision], outcomes: Mapping[str, tuple[str, dict[str, Any]]], left_out: Counter[str]
) -> list[tuple[int, SpacesRecord]]:
    """The records of an episode with their rewards; empty where it is incomplete."""
    ordered = sorted(episode.items(), key=lambda item: item[1].n)
    numbers = [decision.n for _, decision in ordered]
    reason = next((decision.reason for _, decision in ordered if decision.reason), "")
    if numbers != list(range(len(numbers))):
        reason = reason or "in episodes with missing or repeated numbers"
    if any(identifier not in outcomes for identifier, _ in ordered):
        reason = reason or "in episodes with decisions without outcome"
    if any(later.time < earlier.time for (_, earlier), (_, later) in pairwise(ordered)):
        _LOGGER.warning(
            "%s: the clock ran backwards in this episode; its decisions count by number.", ordered[0][1].where
        )
    if reason:
        left_out[reason] += len(ordered)
        return []
    records: list[tuple[int, SpacesRecord]] = []
    step, seen = 0, set[Any]()
    for identifier, decision in ordered:
        outcome, record = outcomes[identifier][1], decision.record
        if tuple(record.actor_id) in seen:
            step, seen = step + 1, set()
        seen.add(tuple(record.actor_id))
        record.reward = float(outcome["reward"])
        record.done = bool(outcome.get("done") or outcome.get("truncated"))
        record.info[TRUNCATION_KEY] = bool(outcome.get("truncated"))
        records.append((step, record))
    return records
