"""Takes the decisions of a log again and compares them bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import CheckpointError, MazeError
from maze.serve.bundle import PolicyBundle
from maze.serve.decision_log import decoded, read_lines, read_rng
from maze.serve.served import has_memory
from maze.serve.session import PolicySession


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
        if row["episode"]:  # otherwise whoever asked has brought the hidden states along
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
        """What the network gets for a row's observation, and the session that says so; None where it cannot be told."""
        key = (bundle.sha256, row["episode"], row["is_shadow"])
        n = int(row["n"])
        if row["episode"] == "":
            session = None if has_memory(bundle) else bundle.session(provided=self._provided)
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
