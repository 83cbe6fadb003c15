"""All policies of the server: canaries, shadows, swaps, sessions, drift."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from maze.core.errors import ConfigError, MazeError, did_you_mean
from maze.serve.bundle import PolicyBundle, PolicySession, seeded_generator
from maze.serve.decision_log import DecisionLog
from maze.serve.pipeline import Actor
from maze.serve.served import Metrics, Options, Query, RefusedError, Served, Settings, as_json, invalid, other_bundle

_LOGGER = logging.getLogger(__name__)

LARGEST_SEED = 2**63 - 1
MOST_ACTORS = 1024
"""Maximum number of actors of a session, whose stacked observations and hidden states are kept."""
_DECISION = re.compile(r"[0-9a-f]{8}-[0-9]{1,18}")
Pending = asyncio.Future[dict[str, Any]] | dict[str, Any]
"""A response, or the future of one."""
Shadowing = tuple[Served, PolicySession, np.random.Generator | None]
"""A shadow, its session, and its generator; None: the greedy action."""


class ServedSession:
    """An episode of a client, decided by the bundle that it began with.

    :param policy: The deciding policy.
    :param shadows: Policies that decide as well, for comparison only.
    :param seed: Seed of sampled actions.
    """

    def __init__(self, policy: Served, shadows: Sequence[Served], seed: int | None) -> None:
        self.id = secrets.token_urlsafe(16)
        self.policy = policy
        self.seed = secrets.randbits(62) if seed is None else seed
        self.acting = policy.session(self.seed)
        self.shadows = [(shadow, shadow.session(self.seed)) for shadow in shadows]
        self.last_use = time.monotonic()
        self.n_steps = 0
        self.actors: set[Actor] = set()
        self.is_busy = False
        self.failure = ""
        self.latest: dict[str, Any] | RefusedError | None = None
        """Answer to the latest observation, or why the policy did not decide on it."""
        self.shadowing: list[asyncio.Task[None]] = []
        """Pending decisions of shadows whose next decision needs the hidden states, or the action to repeat."""
        self._n_episodes = 0
        self._log_key = hashlib.sha256(self.id.encode()).hexdigest()[:16]

    @property
    def episode(self) -> str:
        """Name of the episode in the decision log, which does not reveal the session's identifier."""
        return f"{self._log_key}/{self._n_episodes}"

    async def settled(self) -> None:
        """Wait for shadows that need their decision on the last observation, which may be pending."""
        if self.shadowing:
            await asyncio.wait(self.shadowing)
            self.shadowing = []

    def reset(self, seed: int | None) -> None:
        """Begin another episode.

        :param seed: Seed of sampled actions; `None`: the generators continue.
        :raises RefusedError: A decision of the session is pending.
        """
        if self.is_busy:
            raise _busy()
        for session in (self.acting, *(session for _, session in self.shadows)):
            session.reset(seed)
        self.seed = self.seed if seed is None else seed
        self._n_episodes += 1
        self.actors.clear()
        self.n_steps, self.failure, self.latest = 0, "", None

    def described(self) -> dict[str, Any]:
        """Return the response to the request that begins the session."""
        policy = self.policy
        return {"session": self.id, "policy": policy.name, "bundle": policy.bundle.sha256, "seed": self.seed}


class Policies:
    """All policies of a server, and its sessions.

    :param settings: Settings of all policies.
    :param log: Records each decision.
    :param seed: Seed of the choice between policies by their weights.
    """

    def __init__(
        self, settings: Settings | None = None, log: DecisionLog | None = None, seed: int | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.metrics.registry.register(self)
        self._log = log
        self._served: dict[str, Served] = {}
        self._sessions: OrderedDict[str, ServedSession] = OrderedDict()
        self._random = random.Random(seed)
        self._start, self._n_decisions = secrets.token_hex(4), 0
        self._swapping = asyncio.Lock()
        self._comparing: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Served]:
        return iter(list(self._served.values()))

    # -- which policy -------------------------------------------------------------------------------------------------

    def add(self, name: str, bundle: PolicyBundle, weight: float = 1.0, is_shadow: bool = False) -> Served:
        """Serve a bundle, in place of the one of that name if there is one.

        :param name: Name of the policy.
        :param bundle: The bundle.
        :param weight: Its share of the requests that name no policy, relative to the other weights.
        :param is_shadow: Whether it decides along with the other policies, for comparison only.
        :raises ConfigError: The fallback cannot decide in place of such a policy.
        """
        served = Served(name, bundle, self.settings, self._log, self.metrics)
        if bundle.repeats_actions and self.settings.fallback is not None:
            raise ConfigError(f"Policy {name!r} repeats actions over several steps, which a fallback cannot replace.")
        served.weight, served.is_shadow = weight, is_shadow
        self._served[name] = served
        return served

    def named(self, name: str) -> Served:
        """Return a policy.

        :param name: Its name.
        :raises RefusedError: There is none of that name.
        """
        policy = self._served.get(name)
        if policy is None:
            known = list(self._served)
            message = f"There is no policy {name!r:.100}.{did_you_mean(name, known)} There are {known}."
            raise RefusedError(404, "unknown_policy", message)
        return policy

    def chosen(self, name: str | None, bundle: str | None = None) -> Served:
        """Return the policy that a request names, or one by the weights.

        :param name: Its name; None: the request names none.
        :param bundle: SHA-256 sum of the bundle that has decided in the episode before, if the request has it.
        :raises RefusedError: There is no such policy.
        """
        if name is not None:
            return self.named(name)
        if bundle is not None:
            policy = next((each for each in self._served.values() if each.bundle.sha256 == bundle), None)
            if policy is None:
                raise other_bundle(bundle)
            return policy
        candidates = [policy for policy in self._served.values() if policy.weight > 0 and not policy.is_shadow]
        if len(candidates) == 1:
            return candidates[0]
        if not candidates:
            raise RefusedError(503, "no_policy", "No policy has a weight above 0; name one in the request.")
        return self._random.choices(candidates, [policy.weight for policy in candidates])[0]

    async def put(self, name: str, content: bytes, *, ends_sessions: bool = False, path: Path | None = None) -> Served:
        """Swap the bundle of a policy, or add a policy of weight 0.

        Requests that arrived before are decided by the previous bundle, sessions by the one they began with.

        :param name: Name of the policy.
        :param content: All bytes of the bundle.
        :param ends_sessions: Whether to end the sessions of the previous bundle.
        :param path: File of the bundle, if there is one.
        :raises RefusedError: The name is invalid, or the policy of that name acts in another environment.
        :raises BundleError: The content is not a valid bundle. The previous one stays.
        """
        if not name or len(name) > 100 or not name.isprintable() or "/" in name:
            raise invalid(f"{name!r:.120} is not a valid name of a policy.")
        async with self._swapping:
            # checked in a thread, beside requests
            bundle = await asyncio.get_running_loop().run_in_executor(None, PolicyBundle, content, path)
            before = self._served.get(name)
            if before is not None and _spaces_of(before.bundle) != _spaces_of(bundle):
                message = f"Its observations or actions differ from those of policy {name!r}. Add it by another name."
                raise RefusedError(409, "other_spaces", message)
            weight, is_shadow = (before.weight, before.is_shadow) if before is not None else (0.0, False)
            served = self.add(name, bundle, weight, is_shadow)
        self.metrics.events.labels("swap").inc()
        _LOGGER.info("Policy %s is bundle %s from now on.", name, bundle.sha256)
        if before is not None and ends_sessions:
            for session in [each for each in self._sessions.values() if each.policy is before]:
                self.end_session(session)
        return served

    def change(self, name: str, weight: float | None, is_shadow: bool | None) -> Served:
        """Change a policy's share.

        :param name: Name of the policy.
        :param weight: Its weight, at least 0; None: as before.
        :param is_shadow: Whether it is a shadow; None: as before.
        :raises RefusedError: There is no such policy, or the weight is negative or infinite.
        """
        policy = self.named(name)
        if weight is not None:
            if not 0 <= weight < float("inf"):
                raise invalid(f"`weight` must be a number of at least 0, found {weight}.")
            policy.weight = float(weight)
        policy.is_shadow = policy.is_shadow if is_shadow is None else is_shadow
        _LOGGER.info("Policy %s has the weight %g%s.", name, policy.weight, " (a shadow)" if policy.is_shadow else "")
        return policy

    def remove(self, name: str) -> Served:
        """Remove a policy; its sessions continue until they end.

        :param name: Name of the policy.
        :raises RefusedError: There is none of that name.
        """
        policy = self.named(name)
        del self._served[name]
        _LOGGER.info("Policy %s has been removed.", name)
        return policy

    # -- sessions -----------------------------------------------------------------------------------------------------

    def begin_session(self, policy_name: str | None, seed: int | None) -> ServedSession:
        """Begin a session.

        :param policy_name: Name of its policy; None: by the weights.
        :param seed: Seed of sampled actions.
        :raises RefusedError: There is no such policy, or there are too many sessions.
        """
        if len(self._sessions) >= self.settings.max_sessions:
            message = f"There are {len(self._sessions)} sessions, which is the limit."
            raise RefusedError(503, "too_many_sessions", message)
        policy = self.chosen(policy_name)
        session = ServedSession(policy, self._shadows_of(policy), checked_seed(seed))
        self._sessions[session.id] = session
        return session

    def session(self, identifier: str) -> ServedSession:
        """Return a session and restart its time to expiry.

        :param identifier: Its identifier.
        :raises RefusedError: It has ended, or there never was one.
        """
        session = self._sessions.get(identifier)
        if session is None:
            why = f"it was ended, or not used for {self.settings.session_seconds:g} s"
            raise RefusedError(404, "unknown_session", f"There is no session {identifier!r:.60}: {why}.")
        session.last_use = time.monotonic()
        self._sessions.move_to_end(identifier)
        return session

    def end_session(self, session: ServedSession) -> None:
        """End a session.

        :param session: The session; one that has ended is ignored.
        """
        self._sessions.pop(session.id, None)

    async def expire_sessions(self) -> None:
        """End the sessions that have expired."""
        latest = time.monotonic() - self.settings.session_seconds
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_use >= latest:
                return
            del self._sessions[session.id]
            self.metrics.events.labels("expired_session").inc()

    # -- deciding -----------------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Decisions that are pending."""
        return sum(policy.batcher.n_waiting for policy in self._served.values())

    @property
    def n_sessions(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    def decide(self, policy: Served, observation: Any, options: Options) -> Pending:
        """Decide on one observation without a session.

        :param policy: The deciding policy.
        :param observation: As the raw environment returns it.
        :param options: Options of the decision.
        """
        actor = policy.actor(options)
        acting = policy.converter(actor[0])
        inputs = acting.prepare(observation, actor)
        states = policy.states_before(actor, options)
        rng = seed = None
        if not options.deterministic:
            seed = secrets.randbits(62) if options.seed is None else checked_seed(options.seed)
            rng = seeded_generator(seed)
        facts = (acting, actor, inputs, rng, options.ranked, states, self._next_decision(), observation)
        query = Query(*facts, named=options.episode, n=options.step or 0)
        pending = policy.decide(query)
        if len(self._served) > 1:
            shadows = [
                (each, each.converter(actor[0]), None if rng is None else seeded_generator(seed))
                for each in self._shadows_of(policy)
                if not (each.bundle.has_memory or each.bundle.is_recurrent)
            ]
            self._shadow(shadows, query, pending)
        return pending

    async def decide_in(self, session: ServedSession, observation: Any, options: Options) -> dict[str, Any]:
        """Take the next decision of a session; the latest one may be requested again, after a broken connection.

        :param session: The session.
        :param observation: As the raw environment returns it.
        :param options: Options of the decision.
        """
        step = options.step
        await session.settled()
        while session.is_busy and step == session.n_steps:
            await asyncio.sleep(0.001)  # repeated before the response to the first request, which was lost
        if session.is_busy:
            raise _busy()
        if step is not None and step != session.n_steps:
            if step == session.n_steps - 1 and session.latest is not None:
                return _answered(session.latest)
            message = f"The session's next decision is number {session.n_steps}, not {step}."
            raise RefusedError(409, "wrong_step", message)
        if session.failure:
            message = f"The session's episode failed: {session.failure} Reset or end it."
            raise RefusedError(409, "session_failed", message)
        acting = session.acting
        actor = session.policy.actor(options, session.n_steps)
        if len(session.actors) == MOST_ACTORS and actor not in session.actors:
            raise invalid(f"The session's episode has {MOST_ACTORS} actors, which is the limit. Begin another session.")
        inputs = acting.prepare(observation, actor)
        session.actors.add(actor)
        session.is_busy, session.failure = True, "a decision was not finished in time."
        try:
            rng = None if options.deterministic else acting.rng
            facts = (acting, actor, inputs, rng, options.ranked, acting.states, self._next_decision(), observation)
            query = Query(*facts, episode=session.episode, n=session.n_steps)
            pending = session.policy.decide(query)
            shadows = [(each, own, None if rng is None else own.rng) for each, own in session.shadows]
            session.shadowing = self._shadow(shadows, query, pending)
            session.latest = pending if isinstance(pending, dict) else await pending
            session.failure = ""
        except RefusedError as error:
            # The observation counts, and the episode continues: the client decides this step itself.
            session.failure, session.latest = "", error.with_traceback(None)
            for _, own in session.shadows:
                with suppress(Exception):
                    own.prepare(observation, actor)
        except MazeError as error:
            session.failure = str(error)
            raise
        finally:
            session.is_busy = False
            session.last_use = time.monotonic()
        session.n_steps += 1
        return _answered(session.latest)

    def report(self, decision: str, outcome: Mapping[str, Any]) -> None:
        """Write the outcome of a decision to the log, also long after the decision; it is joined when the log is read.

        :param decision: Identifier of the decision.
        :param outcome: `reward`, and perhaps `done`, `truncated`, `kpis`, `events`.
        :raises RefusedError: There is no log, or a value is invalid.
        """
        if self._log is None:
            raise RefusedError(409, "no_log", "Outcomes are kept in the decision log: start with --decision-log.")
        if not _DECISION.fullmatch(decision):
            raise RefusedError(404, "unknown_decision", f"{decision!r:.60} is not the identifier of a decision.")
        reward = outcome.get("reward")
        if reward is None or not math.isfinite(reward):
            raise invalid(f"`reward` must be a finite number, found {reward!r:.60}.")
        kpis = outcome.get("kpis") or {}
        if not all(type(value) in (int, float) and math.isfinite(value) for value in kpis.values()):
            raise invalid("`kpis` must have finite numbers only.")
        self.metrics.outcomes.inc()
        line = {"kind": "outcome", "time": round(time.time(), 6), "decision": decision}
        self._log.write(as_json({**line, **{name: value for name, value in outcome.items() if value is not None}}))

    def _next_decision(self) -> str:
        self._n_decisions += 1
        return f"{self._start}-{self._n_decisions}"

    # -- shadows ------------------------------------------------------------------------------------------------------

    def _shadows_of(self, policy: Served) -> list[Served]:
        spaces = _spaces_of(policy.bundle)
        others = (each for each in self._served.values() if each.is_shadow and each is not policy)
        return [each for each in others if _spaces_of(each.bundle) == spaces]

    def _shadow(self, shadows: Iterable[Shadowing], query: Query, pending: Pending) -> list[asyncio.Task[None]]:
        """Have shadows decide as well; their failures do not reach the client.

        :return: Tasks to wait for before shadows decide again that are recurrent or repeat actions.
        """
        awaited = []
        for shadow, acting, rng in shadows:
            try:
                inputs = acting.prepare(query.observation, query.actor)
                if inputs is None:
                    acting.finish(None)
                    continue
                own = query._replace(acting=acting, inputs=inputs, states=acting.states, rng=rng, ranked=0)
                decided = shadow.submit(own._replace(is_shadow=True))
            except Exception as error:  # provided code may raise anything
                self.metrics.shadow_decisions.labels(shadow.name, "failed").inc()
                _LOGGER.debug("Shadow %s: %s", shadow.name, error)
                continue
            task = asyncio.ensure_future(self._compare(shadow.name, decided, pending))
            self._comparing.add(task)
            task.add_done_callback(self._comparing.discard)
            if shadow.bundle.is_recurrent or shadow.bundle.repeats_actions:
                awaited.append(task)
        return awaited

    async def _compare(self, name: str, shadowing: asyncio.Future[dict[str, Any]], pending: Pending) -> None:
        try:
            shadowed = await shadowing
            response = pending if isinstance(pending, dict) else await asyncio.shield(pending)
            is_equal = as_json(response["action"]) == as_json(shadowed["action"])
        except Exception:
            result = "failed"
        else:
            result = "equal" if is_equal else "different"
        self.metrics.shadow_decisions.labels(name, result).inc()

    # -- housekeeping -------------------------------------------------------------------------------------------------

    def collect(self) -> Iterable[Metric]:
        """Return the present state as Prometheus metrics; the registry calls it."""
        yield GaugeMetricFamily("maze_decisions_waiting", "Decisions that are pending.", self.n_waiting)
        yield GaugeMetricFamily("maze_sessions", "Sessions that have not ended.", self.n_sessions)
        lost, n_lost = "Lines of the decision log that could not be written.", self._log.n_lost if self._log else 0
        yield CounterMetricFamily("maze_decision_log_lost", lost, n_lost)
        info = GaugeMetricFamily("maze_policy_info", "The weight of a policy.", labels=("policy", "bundle", "shadow"))
        labels = ("policy", "step", "entry")
        psi = GaugeMetricFamily("maze_drift_psi", "Population stability index of an observation entry.", labels=labels)
        outside = GaugeMetricFamily(
            "maze_drift_out_of_range", "Share of values outside the range of the training.", labels=labels
        )
        for policy in self:
            info.add_metric((policy.name, policy.bundle.sha256, str(policy.is_shadow).lower()), policy.weight)
            for entry in policy.guard.entries:
                psi.add_metric((policy.name, entry.step, entry.entry), entry.psi)
                outside.add_metric((policy.name, entry.step, entry.entry), entry.out_of_range)
        yield from (info, psi, outside)

    async def check_drift(self) -> None:
        """Compare the latest observations with the training, and warn where they differ.

        :raises Exception: The comparison of a policy failed; those of the others were made.
        """
        loop = asyncio.get_running_loop()
        checks = [loop.run_in_executor(None, policy.guard.check) for policy in self]
        for result in await asyncio.gather(*checks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def close(self) -> None:
        """End threads, and write the rest of the log."""
        for policy in self:
            policy.batcher.close()
        if self._log is not None:
            self._log.close()


def checked_seed(seed: int | None) -> int | None:
    """Return a seed that a generator accepts.

    :raises RefusedError: It is negative, or too large.
    """
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise invalid(f"`seed` must be a whole number from 0 to 2^63 - 1, found {seed}.")
    return seed


def _answered(answer: dict[str, Any] | RefusedError) -> dict[str, Any]:
    if isinstance(answer, RefusedError):
        raise RefusedError(answer.status, answer.code, str(answer))  # one object would collect tracebacks
    return answer


def _spaces_of(bundle: PolicyBundle) -> Any:
    return [(key, step.observation_space, step.action_space) for key, step in bundle.steps.items()]


def _busy() -> RefusedError:
    return RefusedError(409, "session_busy", "The session's latest decision is pending; send one request at a time.")
