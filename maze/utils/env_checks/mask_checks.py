"""Check that masks allow possible actions and forbid impossible ones, by trying actions in clones.

An environment may refuse a forbidden action (an exception, an entry of the info or an event that no allowed action
leads to), ignore it, or execute it like any other: a mask may forbid actions that are possible but undesirable. An
executed forbidden action is a finding only in an environment that refuses others, or has an event for invalid actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from maze.core.events.event_topic_factory import event_methods
from maze.utils.env_checks.acting import RandomActor, Subject, Transition, play, same, take

IsInvalid = Callable[[Any, float, Mapping[Any, Any]], bool]

_N_STATES = 12
_N_TRIALS = 8
"""Number of continuations tried before an action counts as impossible."""
_N_ACTIONS = 12
"""Number of allowed and of forbidden actions tried in each state."""


def looks_invalid(env: Any, reward: float, info: Mapping[Any, Any]) -> bool:
    """Return whether the info or an event of the completed step marks the action as invalid."""
    if "error" in info:
        return True
    return any("invalid" in event.interface_method.__name__ for event in env.get_step_events())


class Outcome(Enum):
    """Effect of an action on an environment."""

    REFUSED = "refused"
    WITHOUT_EFFECT = "without effect"
    EXECUTED = "executed"


def check_masks(subject: Subject, is_invalid: IsInvalid) -> None:
    """Try allowed and forbidden actions in clones of states that random actions lead to."""
    env, clone, report = subject.make_env(), subject.other(), subject.report
    act = RandomActor(env, subject.seed, subject.masks)
    if not any(act.masks_by_step.values()):
        return
    trials = _Trials(clone, subject, is_invalid)
    env.seed(subject.seed)
    observation = env.reset()
    n_states: dict[Any, int] = {}
    forbidden: dict[tuple[str, str], dict[Outcome, int]] = {}
    for _ in range(subject.n_steps):
        actor = env.actor_id()
        if n_states.setdefault(actor[0], 0) < _N_STATES:
            n_states[actor[0]] += 1
            for mask, head in act.masks_by_step[actor[0]].items():
                where = f"sub-step {actor[0]!r}, observation `{mask}`"
                allowed = np.asarray(observation[mask]) > 0
                if not allowed.any():
                    continue  # reported by the step checks
                tried = trials.some(np.flatnonzero(allowed))
                impossible = [v for v in tried if not trials.is_possible(env, observation, actor, head, v)]
                if impossible:
                    found = f"it allows {head}={impossible[0]}, but the environment always marks it as invalid."
                    report.add("mask-illegal", where, found)
                outcomes = forbidden.setdefault((where, head), {})
                for value in trials.some(np.flatnonzero(~allowed)):
                    outcomes.setdefault(trials.of_forbidden(env, observation, actor, head, value), value)
        observation, _, done, _ = env.step(act(actor, observation))
        if done:
            observation = env.reset()
    for (where, head), outcomes in forbidden.items():
        if Outcome.EXECUTED not in outcomes:
            continue
        value = outcomes[Outcome.EXECUTED]
        if Outcome.REFUSED in outcomes or is_invalid is not looks_invalid or _documents_invalid_actions(env):
            report.add(
                "mask-legal",
                where,
                f"it forbids {head}={value}, which the environment executes like any other action.",
            )
        else:
            report.skip(
                f"forbidden actions, {where}",
                f"the environment executes {head}={value} like any other action, so it is unknown whether the mask has "
                "to forbid it; pass is_invalid=... to decide",
            )


def _documents_invalid_actions(env: Any) -> bool:
    return any("invalid" in name for topic in env.context.event_service.topics for name in event_methods(topic))


def _signals(env: Any, transition: Transition) -> set[Any]:
    events = {event.interface_method.__qualname__ for event in env.get_step_events()}
    return events | set(transition.info if isinstance(transition.info, Mapping) else ())


class _Trials:
    """Try actions in a clone.

    :param clone: Environment to clone states into.
    :param subject: The environment that is checked.
    :param is_invalid: Whether an action in a completed step was invalid.
    """

    def __init__(self, clone: Any, subject: Subject, is_invalid: IsInvalid) -> None:
        self._clone = clone
        self._act = RandomActor(clone, subject.seed, subject.masks)
        self._rng = np.random.default_rng(subject.seed)
        self._is_invalid = is_invalid
        env = subject.make_env()
        courses = play(env, subject.n_steps, subject.seed, subject.masks)
        self._signals_of_allowed = set[Any]().union(*(_signals(env, transition) for transition in courses))
        """Entries of the info, and events, that occur with allowed actions."""

    def some(self, values: np.ndarray) -> list[int]:
        """Draw some of the values."""
        return [int(value) for value in self._rng.permutation(values)[:_N_ACTIONS]]

    def is_possible(self, env: Any, observation: Any, actor: Any, head: str, value: int) -> bool:
        """Return whether the environment accepts the action with at least one continuation of the step."""
        return any(
            self._outcome(env, observation, actor, head, value)[0] is not Outcome.REFUSED for _ in range(_N_TRIALS)
        )

    def of_forbidden(self, env: Any, observation: Any, actor: Any, head: str, value: int) -> Outcome:
        """Return the strongest effect of a forbidden action over several continuations of its step."""
        outcomes = set()
        for _ in range(_N_TRIALS):
            outcome, signals = self._outcome(env, observation, actor, head, value)
            outcomes.add(outcome if signals <= self._signals_of_allowed else Outcome.REFUSED)
            if Outcome.EXECUTED in outcomes:
                break
        return next(outcome for outcome in reversed(list(Outcome)) if outcome in outcomes)

    def _outcome(self, env: Any, observation: Any, actor: Any, head: str, value: int) -> tuple[Outcome, set[Any]]:
        """Return the effect of an action followed by random ones, and the signals of the last sub-step."""
        clone = self._clone
        clone.clone_from(env)
        clone.context.event_service.clear_events()  # of the previous trial
        action = {**self._act(actor, observation), head: np.int64(value)}
        try:
            transition = take(clone, actor, action)
            while not transition.is_step_complete and not transition.done:
                if self._is_dead_end(transition, clone.actor_id()):
                    return Outcome.REFUSED, set()
                following = clone.actor_id()
                transition = take(clone, following, self._act(following, transition.observation))
        except Exception:
            # An environment may refuse an impossible action by raising; other errors are found by the step checks.
            return Outcome.REFUSED, set()
        signals = _signals(clone, transition)
        if self._is_invalid(clone, transition.reward, transition.info if isinstance(transition.info, Mapping) else {}):
            return Outcome.REFUSED, signals
        has_effect = not same(transition.observation, observation)
        return Outcome.EXECUTED if has_effect else Outcome.WITHOUT_EFFECT, signals

    def _is_dead_end(self, transition: Transition, actor: Any) -> bool:
        masks = self._act.masks_by_step[actor[0]]
        return any(not (np.asarray(transition.observation[mask]) > 0).any() for mask in masks)
