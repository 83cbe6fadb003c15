"""Checks of spaces, actors, observations, rewards and flags, sub-step by sub-step, and of action masks.

Masks are checked by trying actions in clones. An environment may refuse a forbidden action (an exception, an entry of
the info or an event that no allowed action leads to), ignore it, or execute it like any other: a mask may forbid
actions that are possible but undesirable. An executed forbidden action is a finding only in an environment that refuses
others, or has an event for invalid actions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID
from maze.core.events.event_topic_factory import event_methods
from maze.utils.env_checks.acting import (
    CheckReport,
    RandomActor,
    Subject,
    Transition,
    describe,
    masked_actions,
    play,
    report_exception,
    same,
    take,
)


def check_steps(subject: Subject, env: Any) -> bool:
    """Step the environment; return whether it can be stepped without an exception."""
    report = subject.report
    for step_key in env.action_spaces_dict:
        for mask in masked_actions(env, step_key, subject.masks)[1]:
            report.skip(
                f"mask `{mask}` of sub-step {step_key!r}", "several action heads have its size; name one (masks=...)"
            )
    step = _Step(report, env)
    act = RandomActor(env, subject.seed, subject.masks)
    try:
        env.seed(subject.seed)
        observation = env.reset()
    except Exception as error:
        report_exception(report, "reset()", error)
        return False
    given: dict[Any, tuple[Any, Any]] = {}
    for _ in range(subject.n_steps):
        try:
            actor = env.actor_id()
        except Exception as error:
            report_exception(report, "actor_id()", error)
            return False
        if not check_actor(report, env, actor):
            return False
        check_observation(report, env, actor, observation)
        if any(finding.check == "observation-keys" for finding in report.findings):
            return False
        _check_masks_of(report, act, actor, observation)
        if actor[0] not in given:
            _check_conversion(report, env, actor[0])
        given[actor[0]] = (observation, copy.deepcopy(observation))
        try:
            transition = take(env, actor, act(actor, observation))
        except Exception as error:
            if _is_next_actor_sound(report, env):
                report_exception(report, f"sub-step {actor[0]!r}, step()", error)
            return False
        report.n_steps += 1
        step.add(transition)
        _check_not_overwritten(report, given)
        observation = transition.observation
        if transition.done:
            observation = env.reset()
            step = _Step(report, env)
    return True


class _Step:
    """Check the order of the actors and the rewards of environment steps.

    :param report: Receives the findings.
    :param env: The environment, just reset.
    """

    def __init__(self, report: CheckReport, env: Any) -> None:
        self.report = report
        self.env = env
        self.actors: list[Any] = []
        self.rewards: list[float] = []

    def add(self, transition: Transition) -> None:
        """Check one sub-step."""
        actor = tuple(transition.actor)
        where = f"sub-step {actor[0]!r}"
        self._check_result(transition, where)
        if actor in self.actors:
            found = f"agent {actor[1]} acts a second time before the environment step is complete."
            self.report.add("substep-order", where, found)
            self.actors, self.rewards = [], []
        self.actors.append(actor)
        if transition.is_step_complete:
            self._check_actor_rewards(where)
            self.actors, self.rewards = [], []

    def _check_result(self, transition: Transition, where: str) -> None:
        reward, done, info = transition.reward, transition.done, transition.info
        is_number = isinstance(reward, (int, float, np.integer, np.floating)) and not isinstance(reward, bool)
        if not is_number or not math.isfinite(reward):
            self.report.add("reward", where, f"the reward must be a finite number, found {reward!r}.")
        else:
            self.rewards.append(float(reward))
        if not isinstance(done, (bool, np.bool_)):
            self.report.add("done", where, f"`done` must be true or false, found {done!r}.")
        if not isinstance(info, Mapping):
            self.report.add("info", where, f"`info` must be a dictionary, found {info!r}.")

    def _check_actor_rewards(self, where: str) -> None:
        shares = self.env.get_actor_rewards()
        if shares is None:
            return
        shares = np.asarray(shares, dtype=np.float64)
        n_actors = len(self.actors)
        if shares.ndim != 1 or len(shares) < n_actors:
            found = f"expected one reward for each of the {n_actors} actors of the step, found {shares.tolist()}."
        elif len(self.rewards) == n_actors and not math.isclose(shares.sum(), sum(self.rewards), abs_tol=1e-5):
            found = f"the actors' rewards {shares.tolist()} do not add up to the step's {sum(self.rewards)}."
        else:
            return
        self.report.add("actor-rewards", f"{where}, get_actor_rewards()", found)


def _check_masks_of(report: CheckReport, act: RandomActor, actor: Any, observation: Any) -> None:
    for mask, head in act.masks_by_step[actor[0]].items():
        values = np.asarray(observation[mask])
        if not (values > 0).any():
            report.add("mask-empty", f"sub-step {actor[0]!r}, observation `{mask}`", f"it allows no value of `{head}`.")


def _is_next_actor_sound(report: CheckReport, env: Any) -> bool:
    """Return whether the next actor after a failed step is declared; otherwise report that instead of the exception."""
    try:
        return check_actor(report, env, env.actor_id())
    except Exception:
        return True  # the exception of the step is reported


def _check_not_overwritten(report: CheckReport, given: Mapping[Any, tuple[Any, Any]]) -> None:
    """Check that returned observations do not change: collected data would be wrong.

    :param given: The last observation of each sub-step, and a copy of it.
    """
    for step_key, (observation, kept) in given.items():
        if not same(observation, kept):
            found = "an observation changed after it was returned: the environment continues to write into it."
            report.add("observation-aliasing", f"sub-step {step_key!r}", found)


def _check_conversion(report: CheckReport, env: Any, step_key: Any) -> None:
    """Check that an action converted to the simulation and back is the same."""
    maze_env = env
    while MazeEnv not in type(maze_env).__mro__:
        if "_wrapped_env" not in getattr(maze_env, "__dict__", {}):
            return
        maze_env = maze_env.env
    conversions = maze_env.action_conversion_dict
    if len(conversions) == 1:
        step_key = next(iter(conversions))
    conversion = conversions[step_key]
    action = RandomActor(maze_env, 0, {}).sample((step_key, 0))
    where = f"sub-step {step_key!r}, {type(conversion).__name__}"
    try:
        restored = conversion.maze_to_space(conversion.space_to_maze(action, maze_env.get_maze_state()))
    except NotImplementedError as error:
        report.skip(f"round trip of actions, {where}", describe(error))
        return
    except Exception as error:
        report_exception(report, where, error)
        return
    if not same(action, restored):
        report.add("action-conversion", where, f"{action} became {restored} by conversion to the simulation and back.")


def check_declarations(report: CheckReport, env: Any) -> bool:
    """Check spaces and agent counts; return whether the environment can be stepped."""
    actions, observations, counts = env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict
    if set(actions) != set(observations):
        report.add(
            "spaces", "", f"the sub-steps with actions are {list(actions)}, with observations {list(observations)}."
        )
        return False
    for step_key in actions:
        for name, space in (("action", actions[step_key]), ("observation", observations[step_key])):
            if not isinstance(space, spaces.Dict):
                report.add("spaces", f"sub-step {step_key!r}", f"the {name} space is not a Dict space, but {space}.")
                return False
    is_complete = isinstance(counts, Mapping) and set(counts) == set(actions)
    if not is_complete or not all(_is_whole(n) and (n == -1 or n > 0) for n in counts.values()):
        found = f"expected a positive number of agents, or -1, for each of {list(actions)}, found {counts!r}."
        report.add("agent-counts", "agent_counts_dict", found)
    return True


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def check_actor(report: CheckReport, env: Any, actor: Any) -> bool:
    """Check the next actor; return whether it is declared."""
    known = env.action_spaces_dict
    if not isinstance(actor, tuple) or len(actor) != 2 or actor[0] not in known:
        found = f"expected ActorID(step_key, agent_id) with one of the sub-steps {list(known)}, found {actor!r}."
        report.add("actor-id", "actor_id()", found)
        return False
    step_key, agent_id = actor
    counts = env.agent_counts_dict
    count = counts.get(step_key, -1) if isinstance(counts, Mapping) else -1
    if not _is_whole(agent_id) or agent_id < 0 or (count >= 0 and agent_id >= count):
        found = f"agent {agent_id!r} acts next, but agent_counts_dict declares {count} agent(s), counted from 0."
        report.add("agent-id", f"sub-step {step_key!r}", found)
    return True


def check_observation(report: CheckReport, env: Any, actor: ActorID, observation: Any) -> None:
    """Check that an observation is an element of its space."""
    step_key = actor[0]
    space: spaces.Dict = env.observation_spaces_dict[step_key]
    where = f"sub-step {step_key!r}"
    if not isinstance(observation, Mapping) or set(observation) != set(space):
        found = sorted(observation) if isinstance(observation, Mapping) else type(observation).__name__
        report.add("observation-keys", where, f"expected a dictionary with the keys {sorted(space)}, found {found}.")
        return
    for key, entry in space.items():
        problem = _problem(np.asarray(observation[key]), entry)
        if problem:
            report.add(problem[0], f"{where}, observation `{key}`", problem[1])


def _problem(value: np.ndarray, space: spaces.Space[Any]) -> tuple[str, str] | None:
    """Return the kind and the description of a fault of a value."""
    if space.shape is not None and value.shape != space.shape:
        return "observation-space", f"expected the shape {space.shape}, found {value.shape}."
    if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
        return "observation-space", "some values are not finite."
    if isinstance(space, spaces.Box) and value.dtype != space.dtype:
        return "observation-dtype", f"expected values of type {space.dtype}, found {value.dtype}."
    if not space.contains(value.item() if isinstance(space, spaces.Discrete) else value):
        return "observation-space", f"values from {value.min()} to {value.max()} are not all in {space}."
    return None


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
