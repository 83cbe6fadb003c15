"""Which policy decides, for whom, and what goes on beside it: sessions, canaries, shadows, swaps, drift."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from maze.core.errors import ConfigError, MazeError, did_you_mean
from maze.serve.batching import Turns
from maze.serve.bundle import PolicyBundle, PolicySession, seeded_generator
from maze.serve.decision_log import DecisionLog, written_rng
from maze.serve.pipeline import Actor
from maze.serve.served import (
    Carried,
    Metrics,
    Note,
    Options,
    Query,
    RefusedError,
    Served,
    Settings,
    as_json,
    other_bundle,
)

_LOGGER = logging.getLogger(__name__)

LARGEST_SEED = 2**63 - 1
Begun = asyncio.Future[dict[str, Any]] | dict[str, Any]
"""An answer, or one that will be there."""
_SLICE = 16
"""Rows of batches that are decided before other requests take their turn."""


class ServedSession:
    """An episode of a client, decided by the bundle that it began with.

    :param policy: What decides.
    :param shadows: What decides as well, to be recorded only.
    :param seed: Of sampled actions.
    """

    def __init__(self, policy: Served, shadows: Sequence[Served], seed: int | None) -> None:
        self.id = secrets.token_urlsafe(16)
        self.policy = policy
        self.seed = secrets.randbits(62) if seed is None else seed
        self.acting = policy.session(self.seed)
        self.shadows = [(shadow, shadow.session(self.seed)) for shadow in shadows]
        self.last_use = time.monotonic()
        self.n_steps = 0
        self.is_busy = False
        self.failure = ""
        self.latest: dict[str, Any] | None = None
        self.shadowing: list[asyncio.Task[None]] = []
        """Decisions of shadows whose hidden states have to follow before they decide again."""
        self._n_episodes = 0
        self._log_key = hashlib.sha256(self.id.encode()).hexdigest()[:16]

    @property
    def episode(self) -> str:
        """Name in the decision log, which does not reveal the session's identifier."""
        return f"{self._log_key}/{self._n_episodes}"

    async def settled(self) -> None:
        """Waits for recurrent shadows, which may not have decided about the observation before."""
        if self.shadowing:
            await asyncio.wait(self.shadowing)
            self.shadowing = []

    def reset(self, seed: int | None) -> None:
        """Begins another episode."""
        if self.is_busy:
            raise _busy()
        for session in (self.acting, *(session for _, session in self.shadows)):
            session.reset(seed)
        self.seed = self.seed if seed is None else seed
        self._n_episodes += 1
        self.n_steps, self.failure, self.latest = 0, "", None

    def described(self) -> dict[str, Any]:
        """The answer to the request that begins it."""
        policy = self.policy
        return {"session": self.id, "policy": policy.name, "bundle": policy.bundle.sha256, "seed": self.seed}


class Policies:
    """All policies of a server, and its sessions.

    :param settings: How they are put to work.
    :param log: Records each decision.
    :param seed: Of the choice between policies by their weights.
    """

    def __init__(
        self, settings: Settings | None = None, log: DecisionLog | None = None, seed: int | None = None
    ) -> None:
        self.settings = settings or Settings()
        self.metrics = Metrics()
        self.metrics.registry.register(_Gauges(self))
        self.singles = Turns(max(32, self.settings.max_batch))
        """Requests for one decision that are in work at a time, by client."""
        self.batches = Turns(_SLICE)
        """Rows of batches, and other work as large, that are in work at a time, by client."""
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
        """Puts a bundle to work, in place of the one of that name if there is one.

        :param name: Of the policy.
        :param bundle: The bundle.
        :param weight: Its share of the requests that name no policy, relative to that of the others.
        :param is_shadow: It decides whatever others decide, and what it says is recorded only.
        :raises ConfigError: The fallback cannot stand in for such a policy.
        """
        served = Served(name, bundle, self.settings, self._log, self.metrics)
        if bundle.repeats_actions and self.settings.fallback is not None:
            raise ConfigError(
                f"Policy {name!r} repeats its actions; a fallback that decides once cannot stand in for it."
            )
        served.weight, served.is_shadow = weight, is_shadow
        self._served[name] = served
        return served

    def named(self, name: str) -> Served:
        """A policy.

        :raises RefusedError: There is none of that name.
        """
        policy = self._served.get(name)
        if policy is None:
            known = list(self._served)
            raise RefusedError(
                404,
                "unknown_policy",
                f"There is no policy {name!r:.100}.{did_you_mean(name, known)} There are {known}.",
            )
        return policy

    def chosen(self, name: str | None, bundle: str | None = None) -> Served:
        """The policy that a request asks for, or one by the weights.

        :param name: Its name, if the request says one.
        :param bundle: SHA-256 sum of the bundle that has decided in the episode before, if the request says so.
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
        """Swaps the bundle of a policy, or adds a policy of weight 0.

        Requests that arrived before are decided by the bundle of that time, sessions by the one they began with.

        :param name: Of the policy.
        :param content: All bytes of the bundle.
        :param ends_sessions: End the sessions of the bundle before.
        :param path: Where the bundle lies, if it does.
        :raises RefusedError: The name is none, or the policy of that name acts in another environment.
        :raises BundleError: It is no bundle. The one before goes on.
        """
        if not name or len(name) > 100 or not name.isprintable() or "/" in name:
            raise RefusedError(422, "invalid", f"{name!r:.120} is no name for a policy.")
        async with self._swapping:
            # checked beside the requests, which go on
            bundle = await asyncio.get_running_loop().run_in_executor(None, PolicyBundle, content, path)
            before = self._served.get(name)
            if before is not None and _spaces_of(before.bundle) != _spaces_of(bundle):
                raise RefusedError(
                    409,
                    "other_spaces",
                    f"The bundle's observations or actions are not those of the policy {name!r}. Add it under another "
                    "name.",
                )
            weight, is_shadow = (before.weight, before.is_shadow) if before is not None else (0.0, False)
            served = self.add(name, bundle, weight, is_shadow)
        self.metrics.events.labels("swap").inc()
        _LOGGER.info("Policy %s is bundle %s from now on.", name, bundle.sha256)
        if before is not None and ends_sessions:
            for session in [each for each in self._sessions.values() if each.policy is before]:
                self.end_session(session)
        return served

    def change(self, name: str, weight: float | None, is_shadow: bool | None) -> Served:
        """Changes a policy's share.

        :param name: Of the policy.
        :param weight: Its weight.
        :param is_shadow: Whether it is a shadow.
        """
        policy = self.named(name)
        if weight is not None:
            if not 0 <= weight < float("inf"):
                raise RefusedError(422, "invalid", f"`weight` must be a number of at least 0, got {weight}.")
            policy.weight = float(weight)
        policy.is_shadow = policy.is_shadow if is_shadow is None else is_shadow
        _LOGGER.info(
            "Policy %s has the weight %g%s.", name, policy.weight, " and is a shadow" if policy.is_shadow else ""
        )
        return policy

    def remove(self, name: str) -> Served:
        """Takes a policy away; its sessions go on until they end."""
        policy = self.named(name)
        del self._served[name]
        _LOGGER.info("Policy %s has been taken away.", name)
        return policy

    # -- sessions -----------------------------------------------------------------------------------------------------

    def begin_session(self, policy_name: str | None, seed: int | None) -> ServedSession:
        """Begins a session.

        :param policy_name: Asks for a certain policy.
        :param seed: Of sampled actions.
        """
        self.expire_sessions()
        if len(self._sessions) >= self.settings.max_sessions:
            raise RefusedError(
                503, "too_many_sessions", f"There are {len(self._sessions)} sessions, and may not be more."
            )
        policy = self.chosen(policy_name)
        session = ServedSession(policy, self._shadows_of(policy), checked_seed(seed))
        self._sessions[session.id] = session
        return session

    def session(self, identifier: str) -> ServedSession:
        """A session, which has been used by this.

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
        """Ends a session."""
        self._sessions.pop(session.id, None)

    def expire_sessions(self) -> None:
        """End the sessions that were not used for long."""
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
        """Decisions that have not been taken yet."""
        return sum(policy.batcher.n_waiting for policy in self._served.values())

    @property
    def n_sessions(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    @property
    def n_lost_lines(self) -> int:
        """Lines of the decision log that the disk did not take."""
        return 0 if self._log is None else self._log.n_lost

    async def decide(
        self, policy: Served, observation: Any, options: Options, seed: int | None, carried: Carried
    ) -> dict[str, Any]:
        """Decide about one observation by itself.

        :param policy: What decides.
        :param observation: As the raw environment gives it.
        :param options: How.
        :param seed: Of a sampled action.
        :param carried: What is brought along of the episode.
        """
        begun = self._begin_alone(policy, observation, options, seed, carried)
        return begun if isinstance(begun, dict) else await begun

    async def decide_many(
        self,
        policy: Served,
        observations: Sequence[Any],
        options: Options,
        seed: int | None,
        carried: Sequence[Carried],
        client: Hashable = None,
        weight: int = 1,
    ) -> list[dict[str, Any]]:
        """Decide about observations that have nothing to do with each other, a slice of them in each turn of a client.

        The arguments are those of :meth:`decide`, `carried` one for each observation; the action for `observations[i]`
        is sampled with the seed `seed + i`.

        :param client: Whose turns they take.
        :param weight: Work for one observation, in units of that for one of a few numbers.
        """
        size = max(1, _SLICE // weight)
        answers: list[dict[str, Any]] = []
        for begin in range(0, len(observations), size):
            async with self.batches.turn(client, size * weight):
                begun: list[Begun] = []
                for index in range(begin, min(begin + size, len(observations))):
                    row_seed = None if seed is None else seed + index
                    try:
                        begun.append(self._begin_alone(policy, observations[index], options, row_seed, carried[index]))
                    except MazeError as error:
                        error.remark(f"This is observations[{index}].")
                        raise
                answers += [each if isinstance(each, dict) else await each for each in begun]
        return answers

    async def decide_in(
        self, session: ServedSession, observation: Any, options: Options, step: int | None
    ) -> dict[str, Any]:
        """Takes the next decision of a session.

        :param session: The session.
        :param observation: As the raw environment gives it.
        :param options: How.
        :param step: Number of the decision, from 0. The latest one may be requested again, after a broken connection.
        """
        await session.settled()
        while session.is_busy and step == session.n_steps:
            await asyncio.sleep(0.001)  # sent again before the first answer, which did not arrive
        if session.is_busy:
            raise _busy()
        if step is not None and step != session.n_steps:
            if step == session.n_steps - 1 and session.latest is not None:
                return session.latest
            raise RefusedError(
                409, "wrong_step", f"The session's next decision is number {session.n_steps}, not {step}."
            )
        if session.failure:
            raise RefusedError(
                409, "session_failed", f"The session's episode failed: {session.failure} Reset or end it."
            )
        acting = session.acting
        actor = session.policy.actor(options, session.n_steps)
        inputs = acting.prepare(observation, actor)
        session.is_busy, session.failure = True, "a decision was not finished in time."
        try:
            rng = None if options.deterministic else acting.rng
            note = self._note(observation, actor, rng, session)
            begun = session.policy.decide(Query(acting, actor, inputs, rng, options.ranked, note, acting.states))
            session.shadowing = self._ask_shadows(session.shadows, actor, options, note, begun, None)
            session.latest = begun if isinstance(begun, dict) else await begun
            session.failure = ""
        except RefusedError:
            # The observation counts, and the episode continues: the client decides this step itself.
            session.failure, session.latest = "", None
            session.n_steps += 1
            raise
        except MazeError as error:
            session.failure = str(error)
            raise
        finally:
            session.is_busy = False
            session.last_use = time.monotonic()
        session.n_steps += 1
        return session.latest

    def _begin_alone(
        self, policy: Served, observation: Any, options: Options, seed: int | None, carried: Carried
    ) -> Begun:
        actor = policy.actor(options)
        acting = policy.converter(actor[0])
        inputs = acting.prepare(observation, actor)
        states = policy.states_before(actor, carried)
        rng = None
        if not options.deterministic:
            seed = secrets.randbits(62) if seed is None else checked_seed(seed)
            rng = seeded_generator(seed)
        note = self._note(observation, actor, rng, None)
        begun = policy.decide(Query(acting, actor, inputs, rng, options.ranked, note, states))
        if len(self._served) > 1:
            shadows = [
                each for each in self._shadows_of(policy) if not (each.bundle.has_memory or each.bundle.is_recurrent)
            ]
            converters = [(shadow, shadow.converter(actor[0])) for shadow in shadows]
            self._ask_shadows(converters, actor, options, note, begun, seed)
        return begun

    def _note(
        self, observation: Any, actor: Actor, rng: np.random.Generator | None, session: ServedSession | None
    ) -> Note:
        self._n_decisions += 1
        decision = f"{self._start}-{self._n_decisions}"
        state = None if rng is None or self._log is None else written_rng(rng)
        if session is None:
            return Note(decision, "", 0, actor[1], observation, state)
        return Note(decision, session.episode, session.n_steps, actor[1], observation, state)

    # -- shadows ------------------------------------------------------------------------------------------------------

    def _shadows_of(self, policy: Served) -> list[Served]:
        spaces = _spaces_of(policy.bundle)
        return [
            each
            for each in self._served.values()
            if each.is_shadow and each is not policy and _spaces_of(each.bundle) == spaces
        ]

    def _ask_shadows(
        self,
        shadows: Sequence[tuple[Served, PolicySession]],
        actor: Actor,
        options: Options,
        note: Note,
        begun: Begun,
        seed: int | None,
    ) -> list[asyncio.Task[None]]:
        """Have shadows decide as well; their failures do not reach the client.

        :return: What has to be done before recurrent ones of them decide again.
        """
        awaited = []
        for shadow, acting in shadows:
            try:
                inputs = acting.prepare(note.observation, actor)
                if inputs is None:
                    acting.finish(None)
                    continue
                rng = None
                if not options.deterministic:
                    rng = acting.rng if seed is None else seeded_generator(seed)
                state = None if rng is None or self._log is None else written_rng(rng)
                shadowed = note._replace(is_shadow=True, rng=state)
                pending = shadow.submit(Query(acting, actor, inputs, rng, 0, shadowed, acting.states))
            except MazeError as error:
                self.metrics.shadow_decisions.labels(shadow.name, "failed").inc()
                _LOGGER.debug("Shadow %s: %s", shadow.name, error)
                continue
            task = asyncio.ensure_future(self._compare(shadow.name, pending, begun))
            self._comparing.add(task)
            task.add_done_callback(self._comparing.discard)
            if shadow.bundle.is_recurrent:
                awaited.append(task)
        return awaited

    async def _compare(self, name: str, shadowing: asyncio.Future[dict[str, Any]], begun: Begun) -> None:
        try:
            said = await shadowing
            answered = begun if isinstance(begun, dict) else await asyncio.shield(begun)
            is_equal = as_json(answered["action"]) == as_json(said["action"])
        except MazeError:
            result = "failed"
        else:
            result = "equal" if is_equal else "different"
        self.metrics.shadow_decisions.labels(name, result).inc()

    # -- what goes on -------------------------------------------------------------------------------------------------

    async def look_at_drift(self) -> None:
        """Compare the latest observations with the training, and warn where they differ.

        :raises Exception: The comparison of a policy failed; those of the others were made.
        """
        loop = asyncio.get_running_loop()
        looks = [loop.run_in_executor(None, policy.guard.look) for policy in self]
        for result in await asyncio.gather(*looks, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    def close(self) -> None:
        """Ends threads, and writes what the log still has to say."""
        for policy in self:
            policy.batcher.close()
        if self._log is not None:
            self._log.close()


class _Gauges:
    """The state of policies as metrics of Prometheus, at the moment when they are read."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies

    def collect(self) -> Iterable[Metric]:
        policies = self._policies
        yield GaugeMetricFamily("maze_decisions_waiting", "Decisions that have not been taken yet.", policies.n_waiting)
        yield GaugeMetricFamily("maze_sessions", "Sessions that have not ended.", policies.n_sessions)
        yield CounterMetricFamily("maze_decision_log_lost", "Lines that the disk did not take.", policies.n_lost_lines)
        info = GaugeMetricFamily("maze_policy_info", "The weight of a policy.", labels=("policy", "bundle", "shadow"))
        labels = ("policy", "step", "entry")
        psi = GaugeMetricFamily(
            "maze_drift_psi", "Population stability index of an entry of the observations.", labels=labels
        )
        outside = GaugeMetricFamily(
            "maze_drift_out_of_range", "Share of values outside the range of the training.", labels=labels
        )
        for policy in policies:
            info.add_metric((policy.name, policy.bundle.sha256, str(policy.is_shadow).lower()), policy.weight)
            for entry in policy.guard.entries:
                psi.add_metric((policy.name, entry.step, entry.entry), entry.psi)
                outside.add_metric((policy.name, entry.step, entry.entry), entry.out_of_range)
        yield from (info, psi, outside)


def checked_seed(seed: int | None) -> int | None:
    """A seed that a generator takes.

    :raises RefusedError: It is negative, or too large.
    """
    if seed is not None and not 0 <= seed <= LARGEST_SEED:
        raise RefusedError(422, "invalid", f"`seed` must be a whole number from 0 to 2^63 - 1, got {seed}.")
    return seed


def _spaces_of(bundle: PolicyBundle) -> Any:
    return [(key, step.observation_space, step.action_space) for key, step in bundle.steps.items()]


def _busy() -> RefusedError:
    return RefusedError(
        409, "session_busy", "The session's latest decision has not been taken yet; ask for one at a time."
    )
