"""One bundle at work: requests become rows, rows become batches, and what was decided goes into the log."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram

from maze.core.errors import MazeError, did_you_mean
from maze.serve.batching import Batcher, Row
from maze.serve.bundle import BatchActions, PolicyBundle, PolicySession
from maze.serve.decision_log import DecisionLog, encoded
from maze.serve.drift import DriftGuard, DriftLimits
from maze.serve.pipeline import Actor

Array = np.ndarray[Any, Any]
Fallback = Callable[[Mapping[str, Any], Actor], Any]
"""From the entries of an observation and its actor to an action: decides in place of the policy. A mapping is
taken for the entries of the action, anything else for what the raw environment takes."""


class RefusedError(MazeError):
    """A request is not granted.

    :param status: HTTP status.
    :param code: One word for programs.
    :param message: One sentence for people.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Options(NamedTuple):
    """How a decision is to be taken.

    :param step_key: The sub-step as the request names it; None where there is one only, or the order is fixed.
    :param agent_id: The acting agent.
    :param deterministic: The most probable action instead of a sampled one.
    :param ranked: So many of the most probable actions are wanted as well.
    """

    step_key: str | None = None
    agent_id: int = 0
    deterministic: bool = True
    ranked: int = 0


class Carried(NamedTuple):
    """What a request brings along of an episode that the server does not remember.

    :param state: The state that came with the answer before; None: there is none.
    :param episode_start: Whether the episode begins with this observation; what was before is forgotten.
    """

    state: Any = None
    episode_start: bool = False

    @property
    def bundle(self) -> str | None:
        """SHA-256 sum of the bundle that the state belongs to; None where that does not matter."""
        found = None if self.episode_start or not isinstance(self.state, Mapping) else self.state.get("bundle")
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Settings:
    """How policies are put to work."""

    max_batch: int = 64
    """Most decisions of one call of a network."""
    batch_delay: float = 0.002
    """Seconds that a decision waits at most for others."""
    max_sessions: int = 1000
    """More are refused."""
    session_seconds: float = 900.0
    """A session without a request for so long has ended."""
    drift: DriftLimits = field(default_factory=DriftLimits)
    on_drift: str = "warn"
    """What becomes of observations outside: `warn`, `refuse`, or `fallback`."""
    fallback: Fallback | None = None
    provided: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """Code that bundles ask for, by its name there."""


class Note(NamedTuple):
    """What the decision log says about a row.

    :param decision: Number of the decision.
    :param episode: Which of the sessions' episodes it belongs to; empty: none.
    :param n: Number of the decision in its episode.
    :param agent_id: The acting agent.
    :param observation: As it came.
    :param rng: State of the generator before it drew; None: nothing was drawn.
    :param is_shadow: Whether the decision was recorded only.
    """

    decision: str
    episode: str
    n: int
    agent_id: int
    observation: Any
    rng: Any
    is_shadow: bool = False


class Query(NamedTuple):
    """An observation about which a decision is to be taken.

    :param acting: What has prepared the observation, and makes an action of the decision.
    :param actor: Sub-step and agent.
    :param inputs: What the network takes; None: the last decision holds.
    :param rng: Draws the action; None: the most probable one.
    :param ranked: So many of the most probable actions are wanted as well.
    :param note: What the decision log says of it.
    :param states: Hidden states by state key.
    """

    acting: PolicySession
    actor: Actor
    inputs: Any
    rng: np.random.Generator | None
    ranked: int
    note: Note
    states: Mapping[str, Array]


class Metrics:
    """What the service counts, in a registry of Prometheus of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("maze_requests", "Requests that were answered.", "path", "status")
        self.decisions = self._counter("maze_decisions", "Decisions of a policy that were requested.", "policy")
        self.events = self._counter(
            "maze_events",
            "Swapped bundles, decisions of the fallback, refused observations, expired sessions, failed housekeeping.",
            "event",
        )
        for event in ("swap", "fallback", "refused", "expired_session", "failed_housekeeping"):
            self.events.labels(event)
        self.shadow_decisions = self._counter(
            "maze_shadow_decisions", "What shadows have decided, compared with what was answered.", "policy", "result"
        )
        self.seconds = Histogram(
            "maze_request_seconds",
            "Time to an answer.",
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0),
            registry=self.registry,
        )
        self.batch_sizes = Histogram(
            "maze_batch_size",
            "Decisions taken in one call.",
            ("policy",),
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=self.registry,
        )

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(name, meaning, labels, registry=self.registry)


class Served:
    """One bundle at work under a name.

    :param name: Of the policy.
    :param bundle: The bundle.
    :param settings: See :class:`Settings`.
    :param log: Records each decision.
    :param metrics: Counts decisions.
    """

    def __init__(
        self, name: str, bundle: PolicyBundle, settings: Settings, log: DecisionLog | None, metrics: Metrics
    ) -> None:
        self.name, self.bundle = name, bundle
        self.weight, self.is_shadow = 0.0, False
        self.guard = DriftGuard(name, bundle.drift, settings.drift)
        self._settings, self._metrics = settings, metrics
        # No cycle of references: a bundle that was swapped frees its memory when its last session ends, not some day.
        decide = _without_reference(self._decide)
        self.batcher = Batcher(decide, settings.max_batch, settings.batch_delay)
        self._log = log
        named = {str(piece["name"]) for piece in bundle.card["code"]}
        self._provided = {name: code for name, code in settings.provided.items() if name in named}
        self._step_keys: dict[str, str | int] = {str(key): key for key in bundle.steps}
        self._own_networks = {key for key, step in bundle.steps.items() if None not in step.networks}
        # Without a memory, one session for each sub-step converts for all clients. Missing code is an error here.
        self._converters = {key: self.session() for key in bundle.steps}

    def session(self, seed: int | None = None) -> PolicySession:
        """Begins an episode."""
        return self.bundle.session(seed, self._provided)

    def converter(self, step_key: str | int) -> PolicySession:
        """What converts observations that have nothing to do with each other.

        :raises RefusedError: The policy needs to see those of an episode in their order.
        """
        if self.bundle.has_memory:
            raise RefusedError(
                409,
                "needs_session",
                f"Policy {self.name!r} looks at the observations of an episode one after the other: begin a session "
                "(POST /sessions), and ask /sessions/{id}/act.",
            )
        return self._converters[step_key]

    def states_before(self, actor: Actor, carried: Carried) -> dict[str, Array]:
        """The hidden states `[size]` that a request brings along, by state key; empty where the policy carries none.

        :param actor: Sub-step and agent.
        :param carried: What the request says of them.
        :raises RefusedError: They are missing, are none, or are those of another bundle.
        """
        step, agent_id = self.bundle.step(actor[0]), actor[1]
        state = None if carried.episode_start else carried.state
        if state is None and not step.network(agent_id).state_sizes:
            return {}
        if state is None and not carried.episode_start:
            raise RefusedError(
                422,
                "missing_state",
                f"Policy {self.name!r} carries a hidden state from step to step: send with each observation the "
                "`state` that came with the answer before, and `episode_start`: true where an episode begins; or begin "
                "a session (POST /sessions).",
            )
        values: Any = {}
        if state is not None:
            values = state.get("values") if isinstance(state, Mapping) else None
            if not isinstance(values, Mapping) or state.keys() != {"bundle", "values"}:
                raise RefusedError(
                    422, "wrong_state", "`state` is what came with the answer before: an object, `bundle` and `values`."
                )
            if state["bundle"] != self.bundle.sha256:
                raise other_bundle(state["bundle"])
        try:
            rows = {key: [value] for key, value in values.items()}
            before = step.states_before(rows, carried.episode_start, 1, agent_id)
        except MazeError as error:
            raise RefusedError(422, "wrong_state", str(error)) from error
        return {key: array[0] for key, array in before.items()}

    def _carried_on(self, states: Mapping[str, Array]) -> dict[str, Any]:
        """What an answer says of the hidden states that the next request brings along.

        :param states: `[size]` by state key.
        """
        # as double precision, whose text gives back exactly these bits
        values = {key: array.astype(np.float64) for key, array in states.items()}
        return {"state": {"bundle": self.bundle.sha256, "values": values}} if values else {}

    def actor(self, options: Options, n_before: int | None = None) -> Actor:
        """The actor of a request.

        :param options: What the request says.
        :param n_before: Number of decisions in the episode so far, where there is one.
        :raises RefusedError: There is no such sub-step, or the request has to name one.
        """
        if options.step_key is None:
            if len(self._step_keys) == 1:
                return next(iter(self._step_keys.values())), options.agent_id
            sequence = self.bundle.actor_sequence
            if n_before is not None and sequence:
                return sequence[n_before % len(sequence)]
            raise RefusedError(
                422,
                "which_step",
                f"Policy {self.name!r} has sub-steps; ask act/<step key>, of {list(self._step_keys)}.",
            )
        if options.step_key not in self._step_keys:
            known = list(self._step_keys)
            raise RefusedError(
                404,
                "unknown_step",
                f"Policy {self.name!r} has no sub-step {options.step_key!r:.100}."
                f"{did_you_mean(options.step_key, known)} It has {known}.",
            )
        return self._step_keys[options.step_key], options.agent_id

    def decide(self, query: Query) -> asyncio.Future[dict[str, Any]] | dict[str, Any]:
        """Have a decision taken, or answer at once where the network does not decide.

        Observations about which the network does not decide leave no trace in its hidden states.
        """
        acting, note, step_key = query.acting, query.note, query.actor[0]
        self._metrics.decisions.labels(self.name).inc()
        if query.inputs is None:
            self._record("repeated", step_key, note)
            return self._answer(acting.finish(None), note)
        settings = self._settings
        self.guard.add(step_key, acting.converted)
        if settings.on_drift != "warn" and (why := self.guard.outside(step_key, acting.converted)):
            if settings.fallback is None:
                self._metrics.events.labels("refused").inc()
                self._record("refused", step_key, note, reason=why)
                raise RefusedError(422, "out_of_distribution", f"Policy {self.name!r} does not decide: {why}")
            self._metrics.events.labels("fallback").inc()
            action = self._packed(settings.fallback(acting.converted, query.actor), step_key)
            self._record("fallback", step_key, note, reason=why, action=action)
            kept = {} if note.episode else self._carried_on(query.states)
            return {**self._answer(action, note), "policy": "fallback", "reason": why, **kept}
        return self.submit(query)

    def submit(self, query: Query) -> asyncio.Future[dict[str, Any]]:
        """Have the network decide, together with other observations."""
        step_key, agent_id = query.actor
        key = (step_key, agent_id if step_key in self._own_networks else 0, query.rng is None, query.ranked)
        finish = partial(self._finished, query.acting, query.note)
        return self.batcher.submit(key, Row(query.inputs, query.rng, query.note, query.states, finish))

    def _finished(self, acting: PolicySession, note: Note, decision: Any) -> dict[str, Any]:
        """The answer for a decision; the session's hidden states are those that follow."""
        chosen, ranked, states = decision
        finish = acting.finish
        candidates = [{"action": finish(action), "probability": probability} for action, probability in ranked]
        answer = self._answer(finish(chosen), note)
        if candidates:
            answer["ranked"] = candidates
        if states and note.episode:
            acting.states = states
        elif states:
            answer |= self._carried_on(states)
        return answer

    def _answer(self, action: Any, note: Note) -> dict[str, Any]:
        return {"action": action, "policy": self.name, "bundle": self.bundle.sha256, "decision": note.decision}

    def _packed(self, action: Any, step_key: str | int) -> Any:
        """What the raw environment takes, for what a fallback has decided."""
        kind = self.bundle.steps[step_key].action_kind
        if not isinstance(action, Mapping) or kind not in {"single", "tuple"}:
            return action
        return next(iter(action.values())) if kind == "single" else list(action.values())

    def _record(self, kind: str, step_key: str | int, note: Note, **more: Any) -> None:
        """Writes into the log what is no decision of the network."""
        if self._log is not None:
            self._log.write(self._line(kind, step_key, rows=[note._asdict()], **more))

    def described(self) -> dict[str, Any]:
        """Everything that a person or a program may want to know, as JSON."""
        bundle = self.bundle
        return {
            "name": self.name,
            "bundle": bundle.sha256,
            "weight": self.weight,
            "shadow": self.is_shadow,
            "needs_session": bundle.has_memory,
            "recurrent": bundle.is_recurrent,
            "actor_sequence": [[str(key), agent] for key, agent in bundle.actor_sequence],
            "steps": [
                {
                    "step": str(key),
                    "observation": step.observation_space,
                    "observation_kind": step.observation_kind,
                    "action": step.action_space,
                    "action_kind": step.action_kind,
                    "masks": step.masks,
                    "hidden_states": next(iter(step.networks.values())).state_sizes,
                }
                for key, step in bundle.steps.items()
            ],
            "drift": [entry._asdict() for entry in self.guard.entries],
            "card": bundle.card,
        }

    def _decide(self, key: Any, rows: Sequence[Row]) -> Sequence[Any]:
        """Decides a batch; answers with each row's action and ranked actions by head, and hidden states that follow."""
        step_key, agent_id, deterministic, ranked = key
        inputs = {name: np.stack([row.inputs[name] for row in rows]) for name in rows[0].inputs}
        states = {name: np.stack([row.states[name] for row in rows]) for name in rows[0].states}
        rngs = None if deterministic else [row.rng for row in rows if row.rng is not None]
        answer: BatchActions = self.bundle.act_batch(
            step_key, inputs, agent_id=agent_id, deterministic=deterministic, rngs=rngs, ranked=ranked, states=states
        )
        self._metrics.batch_sizes.labels(self.name).observe(len(rows))
        if self._log is not None:
            more = {
                "network_of": agent_id,
                "inputs": {name: encoded(array) for name, array in inputs.items()},
                "actions": {head: encoded(array) for head, array in answer.actions.items()},
                "rows": [row.note._asdict() for row in rows],
            }
            if states:
                more["states"] = {name: encoded(array) for name, array in states.items()}
            self._log.write(self._line("decided", step_key, **more))
        return [
            (answer.row(index), answer.ranked[index] if ranked else (), answer.states_of(index))
            for index in range(len(rows))
        ]

    def _line(self, kind: str, step_key: str | int, **more: Any) -> bytes:
        line = {"kind": kind, "time": round(time.time(), 6), "policy": self.name, "bundle": self.bundle.sha256}
        return as_json({**line, "step": str(step_key), **more})


def other_bundle(found: Any) -> RefusedError:
    """The refusal of a state of a bundle that is not at work."""
    return RefusedError(
        409,
        "state_of_other_bundle",
        f"The `state` belongs to the bundle {found!r:.80}, which does not decide here (any more): begin another "
        "episode (`episode_start`: true). Sessions go on with the bundle that they began with.",
    )


def _without_reference(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method of an object that it does not keep alive."""
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = weak()
        assert found is not None, "a pending request holds a reference to its policy"
        return found(*arguments)

    return call


def as_json(value: Any) -> bytes:
    """JSON of plain data and arrays."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _plain(value: Any) -> Any:
    """What orjson knows nothing of: arrays that do not lie in one piece, mappings that are no dictionaries."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no JSON")
