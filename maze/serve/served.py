"""One policy of the server: micro-batching, drift guard, hidden states, metrics and log entries of its decisions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import orjson
from prometheus_client import CollectorRegistry, Counter, Histogram

from maze.core.env.structured_env import has_agent
from maze.core.errors import ConfigError, MazeError, did_you_mean
from maze.core.trajectory_recording.datasets.decision_data import encoded
from maze.distributions.numpy_distributions import Sampler, probabilities_of, sampler_of, uniform_logits
from maze.serve.bundle import BatchActions, PolicyBundle, PolicySession
from maze.serve.decision_log import DecisionLog, written_rng
from maze.serve.drift import DriftGuard, DriftLimits
from maze.serve.pipeline import Actor, Provided, needed_code, packed

Array = np.ndarray[Any, Any]
Fallback = Callable[[Mapping[str, Any], Actor], Any]
"""Decides in place of the policy, from the entries of an observation and its actor. A returned mapping holds the
entries of the action, anything else is the action as the raw environment takes it."""
# Networks that take longer run in a thread, so that the event loop reads other requests meanwhile.
_BLOCKING_SECONDS = 0.004


class RefusedError(MazeError):
    """The server refuses a request.

    :param status: HTTP status.
    :param code: Machine-readable error code.
    :param message: One sentence for people.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


def invalid(message: str) -> RefusedError:
    """Return the refusal of a request with an invalid field."""
    return RefusedError(422, "invalid", message)


class Options(NamedTuple):
    """Options of a requested decision; without a session, hidden state and place in an episode are among them.

    :param step_key: Sub-step as named by the request; None where there is only one, or the order is fixed.
    :param agent_id: The acting agent; None: the next one where the order is fixed, otherwise 0.
    :param deterministic: Choose the greedy action instead of a sampled one.
    :param ranked: Number of most probable actions to return as well.
    :param seed: Seed of a sampled action.
    :param step: Number of the decision in the episode, from 0; None: the next one.
    :param episode: Name of the episode for the decision log; empty: none.
    :param state: The state returned with the previous decision; None: there is none.
    :param episode_start: Whether an episode starts with this observation, which sets hidden states to zero.
    """

    step_key: str | None
    agent_id: int | None
    deterministic: bool
    ranked: int
    seed: int | None
    step: int | None
    episode: str
    state: Any
    episode_start: bool

    @property
    def bundle(self) -> str | None:
        """SHA-256 sum of the bundle that returned the state; None where it does not matter."""
        found = None if self.episode_start or not isinstance(self.state, Mapping) else self.state.get("bundle")
        return found if isinstance(found, str) else None


@dataclass(frozen=True)
class Settings:
    """Settings of all policies of a server.

    :param max_batch: Maximum number of decisions in one call of a network.
    :param batch_delay: Maximum seconds that a decision waits for others of its batch.
    :param max_sessions: Maximum number of sessions; more are refused.
    :param session_seconds: Seconds without a request after which a session expires.
    :param on_drift: Reaction to an observation outside the training's range: `warn`, `refuse`, or `fallback`.
    :param provided: Code that bundles need, by its name in their cards.
    :param explore: Probability, for each action head, of an action drawn uniformly from the allowed ones.
    """

    max_batch: int = 64
    batch_delay: float = 0.002
    max_sessions: int = 1000
    session_seconds: float = 900.0
    drift: DriftLimits = field(default_factory=DriftLimits)
    on_drift: str = "warn"
    fallback: Fallback | None = None
    provided: Provided = field(default_factory=dict)
    explore: float = 0.0


class Query(NamedTuple):
    """An observation to decide on; a row of a batch, and of an entry of the decision log.

    :param acting: Session that has prepared the observation and converts the decision to an action.
    :param inputs: Network inputs without the batch dimension; None: the last decision is repeated.
    :param rng: Samples the action; None: the greedy action.
    :param ranked: Number of most probable actions to return as well.
    :param states: Hidden states `[size]` by state key; empty where none are carried.
    :param decision: Identifier of the decision.
    :param observation: As received.
    :param episode: Episode of a session in the decision log; empty: no session.
    :param named: Episode as the client names it in a request without a session; empty: it names none.
    :param n: Number of the decision in its episode.
    """

    acting: PolicySession
    actor: Actor
    inputs: Mapping[str, Array] | None
    rng: np.random.Generator | None
    ranked: int
    states: Mapping[str, Array]
    decision: str
    observation: Any
    episode: str = ""
    named: str = ""
    n: int = 0
    is_shadow: bool = False

    def entry(self) -> dict[str, Any]:
        """Return the query in the decision log, with the state of its generator."""
        return {
            "decision": self.decision,
            "episode": self.episode,
            **({"client_episode": self.named} if self.named else {}),
            "n": self.n,
            "agent_id": self.actor[1],
            "observation": self.observation,
            "rng": None if self.rng is None else written_rng(self.rng),
            "is_shadow": self.is_shadow,
        }


class Metrics:
    """Counters and histograms of a server, in a Prometheus registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        self.requests = counter("maze_requests", "Requests that were answered.", ("path", "status"))
        self.decisions = counter("maze_decisions", "Decisions requested of a policy.", ("policy",))
        self.events = counter("maze_events", "Events of the server.", ("event",))
        for event in ("swap", "fallback", "refused", "expired_session", "failed_housekeeping"):
            self.events.labels(event)
        self.outcomes = counter("maze_outcomes", "Reported outcomes of decisions.")
        self.shadow_decisions = counter(
            "maze_shadow_decisions", "Decisions of shadows, compared with the returned ones.", ("policy", "result")
        )
        edges = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
        self.seconds = Histogram("maze_request_seconds", "Time to the response.", buckets=edges, registry=self.registry)
        sizes, meaning = (1, 2, 4, 8, 16, 32, 64, 128), "Decisions in one call of a network."
        self.batch_sizes = Histogram("maze_batch_size", meaning, ("policy",), buckets=sizes, registry=self.registry)


# -- micro-batching ----------------------------------------------------------------------------------------------------


@dataclass
class _Batch:
    deadline: float
    rows: list[Any] = field(default_factory=list)
    futures: list[asyncio.Future[Any]] = field(default_factory=list)
    n_before: int = 0


class Batcher:
    """Adaptive micro-batching: rows with equal keys that arrive together are decided in one call.

    A batch is closed as soon as a pass of the event loop adds no row to it, so that a single request does not wait for
    others. The delay bounds how long rows may be added. A network that takes milliseconds runs in a thread; rows that
    arrive meanwhile form the next batch.

    :param decide: Decides the rows of a batch with a key, possibly in a thread; one decision for each. If it raises for
        several rows, it is called for each alone.
    :param finish: Makes the result of a row from its decision, in the event loop; not called if the result is not
        awaited.
    :param max_batch: Maximum number of rows of a call.
    :param max_delay: Maximum seconds that a row waits before its batch is closed.
    """

    def __init__(
        self,
        decide: Callable[[Any, Sequence[Any]], Sequence[Any]],
        finish: Callable[[Any, Any], Any],
        max_batch: int = 64,
        max_delay: float = 0.002,
    ) -> None:
        self._decide, self._finish = decide, finish
        self._max_batch, self._max_delay = max_batch, max_delay
        self._batches: dict[Hashable, _Batch] = {}
        self._is_ticking = False
        self._seconds = 0.0
        self._executor: ThreadPoolExecutor | None = None
        self._in_thread = False
        self.n_waiting = 0
        """Rows that have not been decided."""

    def submit(self, key: Hashable, row: Any) -> asyncio.Future[Any]:
        """Add a row; the future has its result.

        :param key: Rows with the same key can be decided together.
        :param row: The row.
        """
        loop = asyncio.get_running_loop()
        batch = self._batches.get(key)
        if batch is None:
            batch = self._batches[key] = _Batch(loop.time() + self._max_delay)
        future = loop.create_future()
        batch.rows.append(row)
        batch.futures.append(future)
        self.n_waiting += 1
        self._tick_soon(loop)
        return future

    def close(self) -> None:
        """End the thread after the batches that it has begun."""
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    def _tick_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_ticking:
            self._is_ticking = True
            loop.call_soon(self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_ticking = False
        for key, batch in list(self._batches.items()):
            if self._in_thread:
                return  # called again when the thread is done
            n_rows = len(batch.rows)
            if n_rows == batch.n_before or n_rows >= self._max_batch or loop.time() >= batch.deadline:
                del self._batches[key]
                self._run(loop, key, batch)
            batch.n_before = n_rows
        if self._batches:
            self._tick_soon(loop)

    def _run(self, loop: asyncio.AbstractEventLoop, key: Hashable, batch: _Batch) -> None:
        if self._seconds < _BLOCKING_SECONDS:
            self._deliver(batch, self._decided(key, batch.rows))
            return
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, "maze-serve")
        self._in_thread = True

        def done(finished: asyncio.Future[list[Any]]) -> None:
            self._in_thread = False
            self._deliver(batch, finished.result())
            self._tick(loop)

        loop.run_in_executor(self._executor, self._decided, key, batch.rows).add_done_callback(done)

    def _decided(self, key: Hashable, rows: list[Any]) -> list[Any]:
        size = self._max_batch
        parts = (rows[begin : begin + size] for begin in range(0, len(rows), size))
        return [decision for part in parts for decision in self._decided_part(key, part)]

    def _decided_part(self, key: Hashable, rows: Sequence[Any]) -> list[Any]:
        """Return one decision for each row, or the exception that prevented it."""
        # beside a busy event loop, a thread waits for the interpreter's lock longer than for its network
        clock = time.thread_time if self._in_thread else time.perf_counter
        began = clock()
        try:
            return [decision for decision, _ in zip(self._decide(key, rows), rows, strict=True)]
        except Exception as error:
            if len(rows) == 1:
                return [error]
            return [self._decided_part(key, [row])[0] for row in rows]  # an error belongs to its own row only
        finally:
            self._seconds += 0.1 * (clock() - began - self._seconds)

    def _deliver(self, batch: _Batch, decisions: Sequence[Any]) -> None:
        self.n_waiting -= len(batch.futures)
        for row, future, decision in zip(batch.rows, batch.futures, decisions, strict=True):
            if future.done():  # the client has disconnected
                continue
            try:
                if isinstance(decision, Exception):
                    raise decision
                future.set_result(self._finish(row, decision))
            except Exception as error:
                future.set_exception(error)


# -- policies ----------------------------------------------------------------------------------------------------------


class Served:
    """One bundle of the server under a name.

    :param name: Name of the policy.
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
        self.batcher = Batcher(self.decide_batch, self.finished, settings.max_batch, settings.batch_delay)
        self._settings, self._log, self._metrics = settings, log, metrics
        self._provided = needed_code(bundle.card["code"], settings.provided)
        self._step_keys: dict[str, str | int] = {str(key): key for key in bundle.steps}
        # Without stacks and repeated actions, one session for each sub-step serves all clients. Missing code is an
        # error here.
        self._converters = {key: self.session() for key in bundle.steps}
        self._exploring = np.random.default_rng()
        self._uniform: dict[str | int, dict[str, Sampler]] = {}
        for key, step in bundle.steps.items() if settings.explore else ():
            kinds = {head: each.description["distribution"] for head, each in step.heads.items()}
            discrete = ("categorical", "multi_categorical", "bernoulli")
            if continuous := [head for head, kind in kinds.items() if kind not in discrete]:
                raise ConfigError(f"--explore: policy {name!r} has the continuous action heads {continuous}.")
            greedy = {"is_greedy": False}
            self._uniform[key] = {head: sampler_of({**each.description, **greedy}) for head, each in step.heads.items()}

    def session(self, seed: int | None = None) -> PolicySession:
        """Begin an episode."""
        return self.bundle.session(seed, self._provided)

    def converter(self, step_key: str | int) -> PolicySession:
        """Return the session that converts observations of unrelated requests.

        :raises RefusedError: The policy needs the observations of an episode in their order.
        """
        if self.bundle.has_memory:
            message = f"Policy {self.name!r} needs all observations of an episode: begin a session (POST /sessions)."
            raise RefusedError(409, "needs_session", message)
        return self._converters[step_key]

    def states_before(self, actor: Actor, options: Options) -> dict[str, Array]:
        """Return the hidden states `[size]` that a request carries, by state key; empty where the policy has none.

        :param actor: Sub-step and agent.
        :param options: Options of the request.
        :raises RefusedError: The states are missing, malformed, or belong to another bundle.
        """
        step, agent_id = self.bundle.step(actor[0]), actor[1]
        state = None if options.episode_start else options.state
        rows = {}
        if state is not None:
            is_mapping = isinstance(state, Mapping) and state.keys() == {"bundle", "values"}
            if not (is_mapping and isinstance(state["values"], Mapping)):
                message = "`state` must be the object that the previous decision returned, with `bundle` and `values`."
                raise RefusedError(422, "wrong_state", message)
            if state["bundle"] != self.bundle.sha256:
                raise other_bundle(state["bundle"])
            rows = {key: [value] for key, value in state["values"].items()}
        elif not step.network(agent_id).state_sizes:
            return {}
        elif not options.episode_start:
            wanted = "the `state` of the previous decision, or `episode_start`"
            raise RefusedError(422, "missing_state", f"Policy {self.name!r} is recurrent: send {wanted}.")
        try:
            before = step.states_before(rows, options.episode_start, 1, agent_id)
        except MazeError as error:
            raise RefusedError(422, "wrong_state", str(error)) from error
        return {key: array[0] for key, array in before.items()}

    def _carried_on(self, states: Mapping[str, Array]) -> dict[str, Any]:
        """Return the response's entry with the hidden states `[size]` that the next request carries."""
        # as double precision, whose text restores exactly these bits
        values = {key: array.astype(np.float64) for key, array in states.items()}
        return {"state": {"bundle": self.bundle.sha256, "values": values}} if values else {}

    def actor(self, options: Options, n_before: int | None = None) -> Actor:
        """Return the actor of a request.

        :param options: Options of the request.
        :param n_before: Number of decisions in the episode so far, where there is one.
        :raises RefusedError: There is no such sub-step or agent, or the request has to name a sub-step.
        """
        known, sequence = list(self._step_keys), self.bundle.actor_sequence
        following = sequence[n_before % len(sequence)] if sequence and n_before is not None else None
        if following and options.step_key is None and options.agent_id in (None, following[1]):
            return following
        if options.step_key is None and len(known) > 1:
            order = f" Agent {options.agent_id} is not the next one in a fixed order." * (options.agent_id is not None)
            message = f"Policy {self.name!r} has sub-steps; request act/<step key>, of {known}.{order}"
            raise RefusedError(422, "which_step", message)
        name = known[0] if options.step_key is None else options.step_key
        if name not in self._step_keys:
            message = f"Policy {self.name!r} has no sub-step {name!r:.100}.{did_you_mean(name, known)} It has {known}."
            raise RefusedError(404, "unknown_step", message)
        step, agent_id = self.bundle.steps[self._step_keys[name]], options.agent_id or 0
        if not has_agent(step.n_agents, agent_id):
            expected = f"The policy has {step.n_agents} agent(s), counted from 0; -1 if the number varies."
            raise RefusedError(422, "unknown_agent", f"{step.where}: agent {agent_id} is unknown. {expected}")
        step.network(agent_id)
        return step.step_key, agent_id

    def decide(self, query: Query) -> asyncio.Future[dict[str, Any]] | dict[str, Any]:
        """Have the network decide, or answer at once where the drift guard or a repeated action decides.

        Observations that do not reach the network do not change its hidden states.

        :raises RefusedError: The observation is outside the training's range, and is to be refused.
        """
        acting, (step_key, _), settings = query.acting, query.actor, self._settings
        self._metrics.decisions.labels(self.name).inc()
        if query.inputs is None:
            self._record("repeated", step_key, [query.entry()])
            return self._response(acting.finish(None), query)
        self.guard.add(step_key, acting.converted)
        if settings.on_drift != "warn" and (why := self.guard.outside(step_key, acting.converted)):
            if settings.fallback is None:
                self._metrics.events.labels("refused").inc()
                self._record("refused", step_key, [query.entry()], reason=why)
                raise RefusedError(422, "out_of_distribution", f"Policy {self.name!r} does not decide: {why}")
            self._metrics.events.labels("fallback").inc()
            action = settings.fallback(acting.converted, query.actor)
            if isinstance(action, Mapping):
                action = packed(action, self.bundle.steps[step_key].action_kind)
            self._record("fallback", step_key, [query.entry()], reason=why, action=action)
            kept = {} if query.episode else self._carried_on(query.states)
            return {**self._response(action, query), "policy": "fallback", "reason": why, **kept}
        return self.submit(query)

    def submit(self, query: Query) -> asyncio.Future[dict[str, Any]]:
        """Have the network decide, in a batch with other observations."""
        step_key, agent_id = query.actor
        network_of = 0 if None in self.bundle.steps[step_key].networks else agent_id
        key = (step_key, network_of, query.rng is None, query.ranked)
        return self.batcher.submit(key, query)

    def decide_batch(self, key: Any, rows: Sequence[Query]) -> Sequence[Any]:
        """Decide a batch: the action and the ranked actions by head, and the next hidden states, of each row."""
        step_key, agent_id, deterministic, ranked = key
        inputs = _stacked([row.inputs or {} for row in rows])
        states = _stacked([row.states for row in rows])
        rngs = None if deterministic else [row.rng for row in rows if row.rng is not None]
        entries = [] if self._log is None else [row.entry() for row in rows]  # before actions are sampled
        answer = self.bundle.act_batch(
            step_key, inputs, agent_id=agent_id, deterministic=deterministic, rngs=rngs, ranked=ranked, states=states
        )
        self._metrics.batch_sizes.labels(self.name).observe(len(rows))
        more: dict[str, Any] = {}
        if self._log is not None or self._settings.explore:
            more = self._probabilities(step_key, answer, rows, deterministic)
        if self._log is not None:
            arrays = {"inputs": inputs, "actions": answer.actions, **({"states": states} if states else {})}
            parts = {part: {name: encoded(array) for name, array in each.items()} for part, each in arrays.items()}
            self._record("decided", step_key, entries, network_of=agent_id, weight=self.weight, **more, **parts)
        return [
            (answer.row(index), answer.ranked[index] if ranked else (), answer.states_of(index))
            for index in range(len(rows))
        ]

    def _probabilities(
        self, step_key: str | int, answer: BatchActions, rows: Sequence[Query], deterministic: bool
    ) -> dict[str, Any]:
        """Explore, in place, and return the probabilities of the actions with the rows that explored."""
        n_rows, explored = len(rows), np.zeros(len(rows), np.bool_)
        explore = self._settings.explore * np.array([not row.is_shadow for row in rows])
        probabilities: dict[str, list[float] | None] = {}
        for name, logits in answer.logits.items():
            head, actions = self.bundle.steps[step_key].heads[name].description, answer.actions[name]
            is_certain = deterministic or head.get("is_greedy")
            chosen = np.zeros(n_rows, np.bool_)
            if explore.any():
                chosen = self._exploring.random(n_rows) < explore
                drawn = self._uniform[step_key][name](uniform_logits(head, logits), self._exploring, 1.0)
                answer.actions[name] = np.where(chosen.reshape(-1, *[1] * (drawn.ndim - 1)), drawn, actions)
                explored |= chosen
            taken = answer.actions[name]
            found = (
                (taken == actions).reshape(n_rows, -1).all(1).astype(np.float64)
                if is_certain
                else probabilities_of(head, logits, taken)
            )
            if found is not None and explore.any():
                even = probabilities_of(head, uniform_logits(head, logits), taken)
                found = (1.0 - explore) * found + explore * np.asarray(even)
            probabilities[name] = None if found is None else found.tolist()
        return {"probabilities": probabilities, **({"explored": explored.tolist()} if explored.any() else {})}

    def finished(self, query: Query, decision: Any) -> dict[str, Any]:
        """Return the response for a decision; a session keeps the next hidden states."""
        chosen, ranked, states = decision
        acting = query.acting
        candidates = [{"action": acting.finish(action), "probability": probability} for action, probability in ranked]
        response = self._response(acting.finish(chosen), query)
        if candidates:
            response["ranked"] = candidates
        if states and query.episode:
            acting.states = states
        elif states:
            response |= self._carried_on(states)
        return response

    def _response(self, action: Any, query: Query) -> dict[str, Any]:
        return {"action": action, "policy": self.name, "bundle": self.bundle.sha256, "decision": query.decision}

    def _record(self, kind: str, step_key: str | int, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
        if self._log is not None:
            entry = {"kind": kind, "time": round(time.time(), 6), "policy": self.name, "bundle": self.bundle.sha256}
            entry |= {"step": str(step_key), "rows": rows, **more}
            self._log.write(as_json(entry))

    def described(self) -> dict[str, Any]:
        """Name, share, spaces, drift and card of the policy as JSON."""
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


def _stacked(rows: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def other_bundle(found: Any) -> RefusedError:
    """Return the refusal of a state of a bundle that is not served."""
    return RefusedError(
        409,
        "state_of_other_bundle",
        f"The `state` belongs to the bundle {found!r:.80}, which does not decide here (any more): begin another "
        "episode (`episode_start`: true). Sessions keep the bundle that they began with.",
    )


def as_json(value: Any) -> bytes:
    """Return JSON of plain data and arrays."""
    return orjson.dumps(value, default=_plain, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _plain(value: Any) -> Any:
    """Return types that orjson does not serialise: arrays that are not contiguous, mappings other than dictionaries."""
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be serialised as JSON")
