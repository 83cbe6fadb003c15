"""Which policy decides, for whom, and what goes on beside it: sessions, canaries, shadows, swaps, drift."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.errors import ConfigError, MazeError, did_you_mean
from maze.serve.bundle import PolicyBundle
from maze.serve.decision_log import DecisionLog, written_rng
from maze.serve.metrics import Exposition, Histogram, Labels
from maze.serve.pipeline import Actor
from maze.serve.served import (
    Array,
    Carried,
    Note,
    Options,
    Pending,
    RefusedError,
    Served,
    Settings,
    as_json,
    other_bundle,
    repeats_actions,
)
from maze.serve.session import PolicySession, seeded_generator

_LOGGER = logging.getLogger(__name__)

LARGEST_SEED = 2**63 - 1


class ServedSession:
    """An episode that somebody has decided, by the bundle that it began with.

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
        """Decisions of shadows whose hidden states have to follow before they are asked again."""
        self._n_episodes = 0
        self._log_key = hashlib.sha256(self.id.encode()).hexdigest()[:16]

    @property
    def episode(self) -> str:
        """Name in the decision log, from which nobody can tell the session's identifier."""
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
        """What whoever begins it is told."""
        policy = self.policy
        return {"session": self.id, "policy": policy.name, "bundle": policy.bundle.sha256, "seed": self.seed}


class Policies:
    """All policies of a server, and its sessions.

    :param settings: How they are put to work.
    :param log: Is told of each decision.
    :param seed: Of the choice between policies by their weights.
    """

    def __init__(
        self, settings: Settings | None = None, log: DecisionLog | None = None, seed: int | None = None
    ) -> None:
        self.settings = settings or Settings()
        self._log = log
        self._served: dict[str, Served] = {}
        self._sessions: OrderedDict[str, ServedSession] = OrderedDict()
        self._random = random.Random(seed)
        self._start, self._n_decisions = secrets.token_hex(4), 0
        self._swapping = asyncio.Lock()
        self._decided: Counter[str] = Counter()
        self._events: Counter[str] = Counter({"swap": 0, "fallback": 0, "refused": 0, "expired_session": 0})
        self._compared: Counter[tuple[str, str]] = Counter()
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
        served = Served(name, bundle, self.settings, self._log)
        if repeats_actions(bundle) and self.settings.fallback is not None:
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

        What was asked before is decided by the bundle that it was asked of, sessions by the one they began with.

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
        self._events["swap"] += 1
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
        """Ends the sessions that nobody has used for long."""
        latest = time.monotonic() - self.settings.session_seconds
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_use >= latest:
                return
            del self._sessions[session.id]
            self._events["expired_session"] += 1

    # -- deciding -----------------------------------------------------------------------------------------------------

    @property
    def n_waiting(self) -> int:
        """Decisions that have not been taken yet."""
        return sum(policy.batcher.n_waiting for policy in self._served.values())

    async def decide(
        self, policy: Served, observation: Any, options: Options, seed: int | None, carried: Carried
    ) -> dict[str, Any]:
        """Decides about one observation by itself.

        :param policy: What decides.
        :param observation: As the raw environment gives it.
        :param options: How.
        :param seed: Of a sampled action.
        :param carried: What is brought along of the episode.
        """
        begun = self._begin_alone(policy, observation, options, seed, carried)
        return begun if isinstance(begun, dict) else await begun.answer()

    async def decide_many(
        self,
        policy: Served,
        observations: Sequence[Any],
        options: Options,
        seed: int | None,
        carried: Sequence[Carried],
    ) -> list[dict[str, Any]]:
        """Decides about observations that have nothing to do with each other.

        The arguments are those of :meth:`decide`, `carried` one for each observation; the action for `observations[i]`
        is sampled with the seed `seed + i`.
        """
        begun: list[Pending | dict[str, Any]] = []
        for index, observation in enumerate(observations):
            row_seed = None if seed is None else seed + index
            try:
                begun.append(self._begin_alone(policy, observation, options, row_seed, carried[index]))
            except MazeError as error:
                error.remark(f"This is observations[{index}].")
                raise
        return [each if isinstance(each, dict) else await each.answer() for each in begun]

    async def decide_in(
        self, session: ServedSession, observation: Any, options: Options, step: int | None
    ) -> dict[str, Any]:
        """Takes the next decision of a session.

        :param session: The session.
        :param observation: As the raw environment gives it.
        :param options: How.
        :param step: Number of the decision, from 0. The latest one may be asked for again, after a broken connection.
        """
        await session.settled()
        while session.is_busy and step == session.n_steps:
            await asyncio.sleep(0.001)  # asked again before the answer to the first time, which nobody received
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
            begun = self._begin(session.policy, acting, actor, inputs, options.ranked, rng, note, acting.states)
            session.shadowing = self._ask_shadows(session.shadows, actor, options, note, begun, None)
            session.latest = begun if isinstance(begun, dict) else await begun.answer()
            session.failure = ""
        except RefusedError:
            # The observation was taken, and the episode goes on: whoever asks has to decide this once.
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
    ) -> Pending | dict[str, Any]:
        actor = policy.actor(options)
        acting = policy.converter(actor[0])
        inputs = acting.prepare(observation, actor)
        states = policy.states_before(actor, carried)
        rng = None
        if not options.deterministic:
            seed = secrets.randbits(62) if seed is None else checked_seed(seed)
            rng = seeded_generator(seed)
        note = self._note(observation, actor, rng, None)
        begun = self._begin(policy, acting, actor, inputs, options.ranked, rng, note, states)
        if len(self._served) > 1:
            shadows = [each for each in self._shadows_of(policy) if not (each.has_memory or each.bundle.is_recurrent)]
            converters = [(shadow, shadow.converter(actor[0])) for shadow in shadows]
            self._ask_shadows(converters, actor, options, note, begun, seed)
        return begun

    def _begin(
        self,
        policy: Served,
        acting: PolicySession,
        actor: Actor,
        inputs: Any,
        ranked: int,
        rng: np.random.Generator | None,
        note: Note,
        states: Mapping[str, Array],
    ) -> Pending | dict[str, Any]:
        """Has a decision taken, or gives the answer at once where the network is not asked.

        What the network was not asked about leaves no trace in its hidden states.
        """
        self._decided[policy.name] += 1
        if inputs is None:
            policy.record("repeated", actor, note)
            return policy.answer(acting.finish(None), note)
        guard, settings = policy.guard, self.settings
        guard.add(actor[0], acting.converted)
        if settings.on_drift != "warn" and (why := guard.outside(actor[0], acting.converted)):
            if settings.fallback is None:
                self._events["refused"] += 1
                policy.record("refused", actor, note, reason=why)
                raise RefusedError(422, "out_of_distribution", f"Policy {policy.name!r} is not asked: {why}")
            self._events["fallback"] += 1
            action = policy.packed(settings.fallback(acting.converted, actor), actor[0])
            policy.record("fallback", actor, note, reason=why, action=action)
            kept = {} if note.episode else policy.carried_on(states)
            return {**policy.answer(action, note), "policy": "fallback", "reason": why, **kept}
        return policy.submit(acting, actor, inputs, rng, ranked, note, states)

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
        begun: Pending | dict[str, Any],
        seed: int | None,
    ) -> list[asyncio.Task[None]]:
        """Has others decide as well; nothing that happens to them is seen by whoever asked.

        :return: What has to be done before recurrent ones of them are asked again.
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
                pending = shadow.submit(acting, actor, inputs, rng, 0, shadowed, acting.states)
            except MazeError as error:
                self._compared[shadow.name, "failed"] += 1
                _LOGGER.debug("Shadow %s: %s", shadow.name, error)
                continue
            task = asyncio.ensure_future(self._compare(pending, begun))
            self._comparing.add(task)
            task.add_done_callback(self._comparing.discard)
            if shadow.bundle.is_recurrent:
                awaited.append(task)
        return awaited

    async def _compare(self, pending: Pending, begun: Pending | dict[str, Any]) -> None:
        name = pending.served.name
        try:
            said = (await pending.answer())["action"]
            if isinstance(begun, Pending):
                chosen = (await asyncio.shield(begun.future))[0]
                shadowed = pending.future.result()[0]
                is_equal = as_json(chosen) == as_json(shadowed)
            else:
                is_equal = as_json(begun["action"]) == as_json(said)
        except MazeError:
            self._compared[name, "failed"] += 1
        else:
            self._compared[name, "equal" if is_equal else "different"] += 1

    # -- what goes on -------------------------------------------------------------------------------------------------

    async def look_at_drift(self) -> None:
        """Compares what was observed lately with the training, and warns where it is something else."""
        for policy in self:
            await asyncio.get_running_loop().run_in_executor(None, policy.guard.look)

    def expose(self, exposition: Exposition) -> None:
        """Adds what is counted here to the metrics."""
        every = list(self)
        family = exposition.family
        family(
            "maze_decisions_total",
            "counter",
            "Decisions that a policy was asked for.",
            {(("policy", name),): count for name, count in self._decided.items()},
        )
        family(
            "maze_events_total",
            "counter",
            "Swapped bundles, decisions of the fallback, refused observations, sessions that nobody ended.",
            {(("event", name),): count for name, count in self._events.items()},
        )
        family("maze_decisions_waiting", "gauge", "Decisions that have not been taken yet.", {(): self.n_waiting})
        family("maze_sessions", "gauge", "Sessions that go on.", {(): len(self._sessions)})
        family(
            "maze_policy_info",
            "gauge",
            "The weight of a policy.",
            {
                (
                    ("policy", each.name),
                    ("bundle", each.bundle.sha256),
                    ("shadow", str(each.is_shadow).lower()),
                ): each.weight
                for each in every
            },
        )
        family(
            "maze_shadow_decisions_total",
            "counter",
            "What shadows have decided, compared with what was answered.",
            {(("policy", name), ("result", result)): count for (name, result), count in self._compared.items()},
        )
        drift = [(each, entry) for each in every for entry in each.guard.entries]
        for name, meaning, values in (
            ("psi", "Population stability index of an entry of the observations", [entry.psi for _, entry in drift]),
            ("out_of_range", "Share of values outside the training's", [entry.out_of_range for _, entry in drift]),
        ):
            labels = [(("policy", each.name), ("step", entry.step), ("entry", entry.entry)) for each, entry in drift]
            family(f"maze_drift_{name}", "gauge", f"{meaning}.", dict(zip(labels, values, strict=True)))
        lost = 0 if self._log is None else self._log.n_lost
        family("maze_decision_log_lost_total", "counter", "Lines that the disk did not take.", {(): lost})
        sizes: dict[Labels, Histogram] = {(("policy", each.name),): each.batch_sizes for each in every}
        exposition.histograms("maze_batch_size", "Decisions taken in one call.", sizes)

    def close(self) -> None:
        """Ends threads, and writes what the log still has to say."""
        for policy in self:
            policy.batcher.close()
        if self._log is not None:
            self._log.close()


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
