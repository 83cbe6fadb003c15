"""Environment checker: finds faults of structured environments before training.

Masks are checked by trying actions in clones. An environment may refuse a forbidden action (an exception, an entry of
the info or an event that no allowed action leads to), ignore it, or execute it like any other: a mask may forbid
actions that are possible but undesirable. An executed forbidden action is a finding only in an environment that refuses
others, or has an event for invalid actions.

>>> from maze.core.wrappers.maze_gym_env_wrapper import GymMazeEnv
>>> check_env(lambda: GymMazeEnv("CartPole-v1"), n_steps=20).findings
[]
"""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.agent.random_policy import RandomPolicy
from maze.core.env.action_conversion import masked_heads
from maze.core.env.faults import in_simulation
from maze.core.errors import ConfigError, EnvironmentContractError, text_of
from maze.core.events.event_topic_factory import event_methods
from maze.core.log_stats.log_stats import StatsContext
from maze.core.utils.config_utils import EnvFactory, whole_number
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import env_name, restarts_when_copied
from maze.core.wrappers.monitoring_wrapper import base_maze_env

REMEDIES: Mapping[str, str] = {
    "action-conversion": "Make `maze_to_space` the inverse of `space_to_maze`.",
    "actor-id": "Return an ActorID with a declared step key, or declare spaces and conversions for this one.",
    "actor-rewards": "Divide the reward of the step among its actors.",
    "agent-counts": "Give every sub-step its number of agents, or -1 where it varies.",
    "agent-id": "Correct agent_id or the count; -1 if the number varies.",
    "cloning": "Take over the whole state of the other, random generators included.",
    "determinism": "Draw from a generator that seed() sets, and have reset() restore everything else.",
    "done": "Return a bool.",
    "exception": "Make it work for every action of the action space.",
    "futures": "Have CoreEnv.new_future(seed) set every random generator that the running episode draws from.",
    "info": "Return at least {}.",
    "mask-empty": "Leave at least one action; end the episode where there is none.",
    "mask-illegal": "Mask what the environment does not accept.",
    "mask-legal": "Allow every action that is possible, or name what is meant to be left out (is_invalid=...).",
    "observation-aliasing": "Return fresh arrays, or copies.",
    "observation-dtype": "Declare the type that observations have, or convert them to the declared one.",
    "observation-keys": "Observe what the space of the actor that acts next declares.",
    "observation-space": "Correct the conversion (`maze_to_space`) or the space that it declares.",
    "pickling": "Store the whole state in __getstate__, without lambdas, open files and sockets.",
    "reward": "Return a float.",
    "spaces": "Give each sub-step an action space and an observation space, both spaces.Dict({name: space}).",
    "substep-order": "Let each actor act once per step, or say by CoreEnv.is_step_complete() when a step is complete.",
}
"""Remedy for each kind of finding."""

# Sub-steps before a copy is made, an odd number so that copies are made in mid-step as well, and after it.
_N_STEPS_BEFORE, _N_STEPS_AFTER = 25, 50
# Futures, and episodes, that are compared with each other.
_N_FUTURES = 4
_N_STATES = 12
# Number of continuations tried before an action counts as impossible.
_N_TRIALS = 8
# Number of allowed and of forbidden actions tried in each state.
_N_ACTIONS = 12

IsInvalid = Callable[[Any, float, Mapping[Any, Any]], bool]


class Transition(NamedTuple):
    """One sub-step."""

    actor: Any
    action: Any
    observation: Any
    reward: Any
    done: Any
    info: Any
    is_step_complete: bool
    next_actor: Any


@dataclass(frozen=True)
class Finding:
    """One fault."""

    check: str
    """Kind of fault, such as `observation-space`."""
    place: str
    """Environment, sub-step and key."""
    found: str
    """The problem: expected and found."""
    fix: str
    """Remedy."""

    def __str__(self) -> str:
        return f"[{self.check}] {self.place}: {self.found} {self.fix}"


@dataclass
class CheckReport:
    """Findings on an environment, and the checks that were skipped.

    :param env_name: Name of the environment.
    :param findings: The faults; empty: none was found.
    """

    env_name: str
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Checks that were not possible, with their reasons."""
    n_steps: int = 0
    """Sub-steps taken."""
    has_chance: bool | None = None
    """Whether copies of a state with new futures differ; `None`: copies could not be made."""

    def add(self, check: str, where: str, found: str) -> None:
        """Add a finding; further findings of the same kind and place are dropped.

        :param check: Kind of fault, one of `REMEDIES`.
        :param where: Place within the environment; may be empty.
        :param found: Expected and found values.
        """
        place = f"{self.env_name}, {where}" if where else self.env_name
        if all((finding.check, finding.place) != (check, place) for finding in self.findings):
            self.findings.append(Finding(check, place, found, REMEDIES[check]))

    def skip(self, what: str, why: str) -> None:
        """Note that something was not checked; the same note is kept once.

        :param what: The check.
        :param why: The reason.
        """
        if (note := f"{what}: {why}") not in self.skipped:
            self.skipped.append(note)

    def __str__(self) -> str:
        lines = [f"{self.env_name}: {len(self.findings)} finding(s) in {self.n_steps} sub-steps."]
        lines += [f"  {finding}" for finding in self.findings]
        if self.has_chance is not None:
            chance = "differ: the environment is stochastic" if self.has_chance else "are equal: it seems deterministic"
            lines.append(f"  Copies of a state with new futures {chance}.")
        lines += [f"  (not checked) {note}" for note in self.skipped]
        return "\n".join(lines)


def looks_invalid(env: Any, reward: float, info: Mapping[Any, Any]) -> bool:
    """Return whether the info or an event of the completed step marks the action as invalid.

    :param env: The environment after the step. Events with `invalid` in their name mark the action as invalid.
    :param reward: Reward of the step, which is not used; other functions in the place of this one may need it.
    :param info: Info of the step; the key `error` marks the action as invalid.
    """
    return "error" in info or any("invalid" in event.interface_method.__name__ for event in env.get_step_events())


def check_env(
    env: Any | Callable[[], Any],
    n_steps: int = 200,
    seed: int = 1234,
    masks: Mapping[str, str] | None = None,
    is_invalid: IsInvalid = looks_invalid,
    raise_on_findings: bool = False,
) -> CheckReport:
    """Take random actions in an environment and compare its behaviour with the contract.

    Checked are actors and their order, spaces and observations, rewards, `done` and `info`, KPIs of episodes that end,
    determinism under a seed, pickling, cloning and new futures of clones, the round trips of conversions, and action
    masks.

    :param env: The environment with its wrappers, or a class, a function, a configuration or an id that makes one. The
        state of a given environment is undefined afterwards.
    :param n_steps: Sub-steps to take.
    :param seed: Seed of environment and actions.
    :param masks: Action head of each mask that its size does not determine.
    :param is_invalid: Whether the action of a step (environment, reward, info) was invalid. By default: the info has an
        entry `error`, or an event with `invalid` in its name was fired.
    :param raise_on_findings: Raise an :class:`EnvironmentContractError` with all findings.
    :raises ConfigError: `n_steps` is not positive, or no sub-step has a mask and the head that `masks` names for it.
    """
    whole_number("n_steps", n_steps, at_least=1)
    make_env = EnvFactory(env)
    made = make_env()
    report = CheckReport(env_name(base_maze_env(made)))
    with warnings.catch_warnings(), StatsContext():
        warnings.simplefilter("ignore")  # the warnings of environments are about faults that are checked below
        if _check_declarations(report, made):
            _require_masks(made, masks or {})
            subject = _Subject(report, make_env, n_steps, seed, dict(masks or {}))
            if _StepChecks(subject, LogStatsWrapper.wrap(made)).run():  # computes KPIs
                _check_determinism(subject)
                if restarts_when_copied(getattr(base_maze_env(made).core_env, "env", None)):
                    report.skip("pickling", "copies of the simulation begin anew (gymnasium.utils.EzPickle)")
                else:
                    _check_copy(subject, "pickling", lambda env: pickle.loads(pickle.dumps(env)))
                if _check_copy(subject, "cloning", subject.clone):
                    _check_futures(subject)
                    _check_masks(subject, is_invalid)
        try:
            made.close()
        except Exception as error:
            report.add("exception", "close()", f"raised {text_of(error)}.")
    if raise_on_findings and report.findings:
        raise EnvironmentContractError(str(report))
    return report


def _require_masks(env: Any, masks: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if no sub-step has a mask and the action head that is named for it."""
    observations, actions = env.observation_spaces_dict, env.action_spaces_dict
    for mask, head in masks.items():
        if not any(mask in observations[key].spaces and head in actions[key].spaces for key in actions):
            shown = observations.items()
            known = "; ".join(f"{key!r}: {', '.join(seen)} -> {', '.join(actions[key])}" for key, seen in shown)
            raise ConfigError(f"masks: no sub-step has the mask `{mask}` and the action `{head}`. Sub-steps: {known}.")


# -- random courses --------------------------------------------------------------------------------------------------


class RandomActor:
    """Sample actions uniformly from those that masks allow.

    :param env: Environment whose spaces are sampled; the random generators of the spaces are not used.
    :param seed: Seed of the actions.
    :param masks: Action head of each mask that its size does not determine.
    """

    def __init__(self, env: Any, seed: int, masks: Mapping[str, str]) -> None:
        self.masks_by_step: dict[Any, dict[str, str]] = {}
        """Action head by mask, by sub-step."""
        self.ambiguous: list[tuple[Any, str]] = []
        """Sub-steps and masks that fit several heads."""
        for step_key, space in env.observation_spaces_dict.items():
            shapes = {key: entry.shape or () for key, entry in space.items()}
            self.masks_by_step[step_key], unclear = masked_heads(shapes, env.action_spaces_dict[step_key], masks)
            self.ambiguous += [(step_key, mask) for mask in unclear]
        self._policy = RandomPolicy(env.action_spaces_dict, masks)
        self._policy.seed(seed)

    def __call__(self, actor: Any, observation: Any) -> dict[str, Any]:
        """Sample an action that the masks of the observation allow; None: any action."""
        return dict(self._policy.compute_action(observation, actor_id=actor))


def take(env: Any, actor: Any, action: Any) -> Transition:
    """Take one sub-step.

    :param env: A Maze environment with its wrappers.
    :param actor: The actor, which is stored in the result.
    :param action: Its action.
    """
    env.context.pre_step()  # a wrapper may take the first sub-steps of a step itself
    observation, reward, done, info = env.step(action)
    return Transition(
        actor, action, observation, reward, done, info, bool(env.context.is_step_complete), env.actor_id()
    )


def course(env: Any, observation: Any, act: RandomActor, n_steps: int) -> Iterator[Transition]:
    """Yield random sub-steps until the episode ends.

    :param env: A Maze environment with its wrappers, which has been reset.
    :param observation: The observation of the next actor.
    :param act: Samples the actions.
    :param n_steps: Largest number of sub-steps.
    """
    for _ in range(n_steps):
        actor = env.actor_id()
        transition = take(env, actor, act(actor, observation))
        yield transition
        if transition.done:
            return
        observation = transition.observation


def same(one: Any, other: Any) -> bool:
    """Compare nested values; NaN equals NaN.

    Objects whose class defines no equality are compared by their attributes.
    """
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    equality: Any = type(one).__eq__
    if type(one) is type(other) and equality is object.__eq__:
        return same(getattr(one, "__dict__", {}), getattr(other, "__dict__", {}))
    first, second = np.asarray(one), np.asarray(other)
    is_float = all(np.issubdtype(array.dtype, np.floating) for array in (first, second))
    return bool(np.array_equal(first, second, equal_nan=is_float))


def _difference(one: Transition, other: Transition) -> str | None:
    """Return the place of the first difference between two sub-steps."""
    for name in ("actor", "reward", "done"):
        if not same(getattr(one, name), getattr(other, name)):
            return f"sub-step {one.actor[0]!r}, {name}"
    keys = (key for key in one.observation if not same(one.observation[key], other.observation.get(key)))
    key = next(keys, None)
    return None if key is None else f"sub-step {one.next_actor[0]!r}, observation `{key}`"


def _differ(one: list[Transition], other: list[Transition]) -> bool:
    return any(_difference(*pair) for pair in zip(one, other, strict=False))


def has_chance(env: Any) -> bool:
    """Return whether episodes take another course under the same actions when their random numbers are replaced.

    A few futures are compared for at most 50 sub-steps: false is no proof that the environment is deterministic.

    :param env: The environment, which is seeded and reset, and in which random actions are taken.
    """
    courses = []
    for future in range(1, 2 + _N_FUTURES):
        env.seed(1)
        observation = env.reset()
        env.new_future(future)
        transitions = course(env, observation, RandomActor(env, 1, {}), _N_STEPS_AFTER)
        with in_simulation("a simulation with random actions, which shows whether the environment is stochastic"):
            courses.append([copy.deepcopy(each) for each in transitions])
    first, *others = courses
    return any(len(other) != len(first) or _differ(first, other) for other in others)


@dataclass(frozen=True)
class _Subject:
    """The environment that is checked.

    :param report: Receives the findings.
    :param make_env: Makes an environment.
    :param n_steps: Number of sub-steps of a check.
    :param seed: Seed of environment and actions.
    :param masks: Action head of each mask that its size does not determine.
    """

    report: CheckReport
    make_env: Callable[[], Any]
    n_steps: int
    seed: int
    masks: Mapping[str, str]

    def play(self, env: Any, n_steps: int) -> Iterator[Transition]:
        """Yield random sub-steps from the first reset on; a new episode begins when one ends."""
        env.seed(self.seed)
        act, n_left = RandomActor(env, self.seed, self.masks), n_steps
        while n_left > 0:
            for transition in course(env, env.reset(), act, n_left):
                n_left -= 1
                yield transition

    def begun(self) -> tuple[Any, Any]:
        """Return an environment within an episode, and the observation of its next actor."""
        env = self.make_env()
        *_, last = self.play(env, _N_STEPS_BEFORE)
        return env, env.reset() if last.done else last.observation

    def other(self) -> Any:
        """Return an environment in another state."""
        env = self.make_env()
        env.seed(self.seed + 1)
        env.reset()
        return env

    def clone(self, env: Any) -> Any:
        """Return a clone."""
        twin = self.other()
        twin.clone_from(env)
        return twin

    def first_difference(self, env: Any, twin: Any, observation: Any) -> str | None:
        """Take the same actions in both environments until an episode ends; describe the first difference."""
        act = RandomActor(env, self.seed, self.masks)
        for expected in course(env, observation, act, min(self.n_steps, _N_STEPS_AFTER)):
            try:
                found = take(twin, twin.actor_id(), expected.action)
            except Exception as error:
                return f"sub-step {expected.actor[0]!r}, which raised {text_of(error)}"
            if different := _difference(expected, found):
                return different
        return None


# -- sub-step by sub-step --------------------------------------------------------------------------------------------


def _check_declarations(report: CheckReport, env: Any) -> bool:
    """Check spaces and agent counts; return whether the environment can be stepped."""
    actions, observations, counts = env.action_spaces_dict, env.observation_spaces_dict, env.agent_counts_dict
    has_dicts = all(isinstance(space, spaces.Dict) for space in (*actions.values(), *observations.values()))
    if set(actions) != set(observations) or not has_dicts:
        report.add("spaces", "", f"found the action spaces {actions} and the observation spaces {observations}.")
        return False
    is_complete = isinstance(counts, Mapping) and set(counts) == set(actions)
    if not is_complete or not all(isinstance(n, (int, np.integer)) and (n == -1 or n > 0) for n in counts.values()):
        found = f"expected a positive number of agents, or -1, for each of {list(actions)}, found {counts!r}."
        report.add("agent-counts", "agent_counts_dict", found)
    return True


class _StepChecks:
    """Check actors, observations, rewards and flags of random sub-steps.

    :param subject: The environment that is checked.
    :param env: The environment to step.
    """

    def __init__(self, subject: _Subject, env: Any) -> None:
        self.subject, self.env, self.report = subject, env, subject.report
        self.act = RandomActor(env, subject.seed, subject.masks)
        self.actors: list[Any] = []
        """Actors of the current environment step."""
        self.rewards: list[float] = []
        self.returned: dict[Any, tuple[Any, Any]] = {}
        """The last observation of each sub-step, and a copy of it."""

    def run(self) -> bool:
        """Step the environment; return whether it can be stepped without an exception."""
        for step_key, mask in self.act.ambiguous:
            self.report.skip(
                f"mask `{mask}` of sub-step {step_key!r}", "several action heads have its size; name one (masks=...)"
            )
        where = "reset()"
        try:
            self.env.seed(self.subject.seed)
            observation = self.env.reset()
            for _ in range(self.subject.n_steps):
                where = "actor_id()"
                actor = self.env.actor_id()
                where = f"sub-step {actor[0]!r}" if self._is_declared(actor) else ""
                if not where or not self._check_observation(where, actor, observation):
                    return False
                if actor[0] not in self.returned:
                    self._check_conversion(where, actor[0])
                self.returned[actor[0]] = (observation, copy.deepcopy(observation))
                transition = take(self.env, actor, self.act(actor, observation))
                self.report.n_steps += 1
                self._check_transition(where, transition)
                observation = transition.observation
                if transition.done:
                    where = "the KPIs of an episode, or the next reset()"
                    observation = self.env.reset()
                    self.actors, self.rewards = [], []
        except Exception as error:
            with contextlib.suppress(Exception):
                if not self._is_declared(self.env.actor_id()):
                    return False  # the reason of the exception
            self.report.add("exception", where, f"raised {text_of(error)}.")
            return False
        return True

    def _is_declared(self, actor: Any) -> bool:
        """Check the next actor; return whether its sub-step is declared."""
        known, counts = self.env.action_spaces_dict, self.env.agent_counts_dict
        if not isinstance(actor, tuple) or len(actor) != 2 or actor[0] not in known:
            found = f"expected ActorID(step_key, agent_id) with one of the sub-steps {list(known)}, found {actor!r}."
            self.report.add("actor-id", "actor_id()", found)
            return False
        step_key, agent_id = actor
        count = counts.get(step_key, -1) if isinstance(counts, Mapping) else -1
        if not isinstance(agent_id, (int, np.integer)) or agent_id < 0 or (count >= 0 and agent_id >= count):
            found = f"agent {agent_id!r} acts next, but agent_counts_dict declares {count} agent(s), counted from 0."
            self.report.add("agent-id", f"sub-step {step_key!r}", found)
            return False
        return True

    def _check_observation(self, where: str, actor: Any, observation: Any) -> bool:
        """Check an observation; return whether it has the declared keys."""
        declared = self.env.observation_spaces_dict[actor[0]]
        if not isinstance(observation, Mapping) or set(observation) != set(declared):
            found = sorted(observation) if isinstance(observation, Mapping) else type(observation).__name__
            text = f"expected a dictionary with the keys {sorted(declared)}, found {found}."
            self.report.add("observation-keys", where, text)
            return False
        for key, space in declared.items():
            value, place = np.asarray(observation[key]), f"{where}, observation `{key}`"
            if (problem := _problem(value, space)) is not None:
                self.report.add(problem[0], place, problem[1])
            head = self.act.masks_by_step[actor[0]].get(key)
            if head is not None and not (value > 0).any():
                self.report.add("mask-empty", place, f"it allows no value of `{head}`.")
        return True

    def _check_conversion(self, where: str, step_key: Any) -> None:
        """Check that an action converted to the simulation and back is the same."""
        maze_env = base_maze_env(self.env)
        conversions = maze_env.action_conversion_dict
        if len(conversions) == 1:  # wrappers may rename the sub-step
            step_key = next(iter(conversions))
        conversion = conversions[step_key]
        action = RandomActor(maze_env, 0, {})((step_key, 0), None)
        where += f", {type(conversion).__name__}"
        try:
            restored = conversion.maze_to_space(conversion.space_to_maze(action, maze_env.get_maze_state()))
        except NotImplementedError as error:
            self.report.skip(f"round trip of actions, {where}", text_of(error))
            return
        if not same(action, restored):
            found = f"{action} became {restored} by conversion to the simulation and back."
            self.report.add("action-conversion", where, found)

    def _check_transition(self, where: str, transition: Transition) -> None:
        actor, reward, done, info = tuple(transition.actor), transition.reward, transition.done, transition.info
        is_number = isinstance(reward, (int, float, np.integer, np.floating)) and not isinstance(reward, bool)
        if is_number and math.isfinite(reward):
            self.rewards.append(float(reward))
        else:
            self.report.add("reward", where, f"the reward must be a finite number, found {reward!r}.")
        if not isinstance(done, (bool, np.bool_)):
            self.report.add("done", where, f"`done` must be true or false, found {done!r}.")
        if not isinstance(info, Mapping):
            self.report.add("info", where, f"`info` must be a dictionary, found {info!r}.")
        if actor in self.actors:
            found = f"agent {actor[1]} acts a second time before the environment step is complete."
            self.report.add("substep-order", where, found)
            self.actors, self.rewards = [], []
        self.actors.append(actor)
        if transition.is_step_complete:
            self._check_actor_rewards(where)
            self.actors, self.rewards = [], []
        for step_key, (observation, kept) in self.returned.items():
            if not same(observation, kept):  # collected data would be wrong
                found = "an observation changed after it was returned: the environment continues to write into it."
                self.report.add("observation-aliasing", f"sub-step {step_key!r}", found)

    def _check_actor_rewards(self, where: str) -> None:
        shares = self.env.get_actor_rewards()
        if shares is None:
            return
        shares, n_actors = np.asarray(shares, dtype=np.float64), len(self.actors)
        if shares.ndim != 1 or len(shares) < n_actors:
            found = f"expected one reward for each of the {n_actors} actors of the step, found {shares.tolist()}."
        elif len(self.rewards) == n_actors and not math.isclose(shares.sum(), sum(self.rewards), abs_tol=1e-5):
            found = f"the actors' rewards {shares.tolist()} do not add up to the step's {sum(self.rewards)}."
        else:
            return
        self.report.add("actor-rewards", f"{where}, get_actor_rewards()", found)


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


# -- repetitions and copies ------------------------------------------------------------------------------------------


def _check_determinism(subject: _Subject) -> None:
    """Compare two environments with the same seed, and one environment that is seeded twice."""
    first, second = subject.make_env(), subject.make_env()
    expected = list(subject.play(first, subject.n_steps))
    for who, env in (("another environment with the same seed", second), ("the environment, seeded again", first)):
        found = list(subject.play(env, subject.n_steps))
        places = (_difference(*pair) for pair in zip(expected, found, strict=True))
        if place := next(filter(None, places), None):
            subject.report.add("determinism", place, f"{who}, differs under the same actions.")
        with contextlib.suppress(Exception):  # reported at the end of the check
            env.close()


def _check_copy(subject: _Subject, check: str, copied: Callable[[Any], Any]) -> bool:
    """Check that a copy continues as the original does; return whether it does.

    :param check: `pickling` or `cloning`.
    :param copied: Returns a copy of an environment.
    """
    env, observation = subject.begun()
    try:
        twin = copied(env)
    except NotImplementedError as error:
        subject.report.skip(f"{check}, and what masks say", text_of(error))
        return False
    except Exception as error:
        subject.report.add(check, "", f"raised {text_of(error)}.")
        return False
    found = subject.first_difference(env, twin, observation)
    if found:
        subject.report.add(check, found, "the copy behaves differently.")
    return not found


def _check_futures(subject: _Subject) -> None:
    """Check that copies with the same new future are equal, and note whether other futures differ."""
    (env, observation), one, other, report = subject.begun(), subject.other(), subject.other(), subject.report

    def difference_of(first: int, second: int) -> str | None:
        for twin, future in ((one, first), (other, second)):
            twin.clone_from(env)
            twin.new_future(future)
        return subject.first_difference(one, other, observation)

    try:
        if found := difference_of(1, 1):
            report.add("futures", found, "two copies with the same new future go different ways.")
        differs = any(difference_of(1, future) for future in range(2, 2 + _N_FUTURES))
        report.has_chance = differs or has_chance(env)  # chance may come late, such as once a day
    except (NotImplementedError, EnvironmentContractError) as error:
        report.skip("new futures", text_of(error))
        return
    except Exception as error:
        report.add("futures", "new_future()", f"raised {text_of(error)}.")
        return
    if not report.has_chance and _is_chance_hidden(subject):
        report.skip(
            "new futures",
            "new_future() changes nothing, although episodes that begin alike take different courses; planning would "
            "know the future. Where seed() takes effect with the next reset only, or the future is drawn in advance, "
            "override CoreEnv.new_future(seed)",
        )


def _is_chance_hidden(subject: _Subject) -> bool:
    """Return whether episodes that begin with the same observation differ later under the same actions."""
    env = subject.make_env()
    courses: list[tuple[Any, list[Transition]]] = []
    for episode in range(_N_FUTURES):
        env.seed(subject.seed + episode)
        act, first = RandomActor(env, subject.seed, subject.masks), copy.deepcopy(env.reset())
        transitions = course(env, first, act, min(subject.n_steps, _N_STEPS_AFTER))
        courses.append((first, [copy.deepcopy(each) for each in transitions]))
    (first, expected), *others = courses
    return any(same(first, start) and _differ(expected, other) for start, other in others)


# -- masks -----------------------------------------------------------------------------------------------------------


class _Outcome(IntEnum):
    """Effect of an action on an environment, in ascending order."""

    REFUSED = 0
    WITHOUT_EFFECT = 1
    EXECUTED = 2


def _check_masks(subject: _Subject, is_invalid: IsInvalid) -> None:
    """Try allowed and forbidden actions in clones of states that random actions lead to."""
    env, report = subject.make_env(), subject.report
    act = RandomActor(env, subject.seed, subject.masks)
    if not any(act.masks_by_step.values()):
        return
    trials = _Trials(subject, is_invalid)
    env.seed(subject.seed)
    observation = env.reset()
    n_states: dict[Any, int] = {}
    forbidden: dict[tuple[str, str], dict[_Outcome, int]] = {}
    for _ in range(subject.n_steps):
        actor = env.actor_id()
        n_states[actor[0]] = n_states.get(actor[0], 0) + 1
        for mask, head in act.masks_by_step[actor[0]].items() if n_states[actor[0]] <= _N_STATES else ():
            where, allowed = f"sub-step {actor[0]!r}, observation `{mask}`", np.asarray(observation[mask]) > 0
            if not allowed.any():
                continue  # reported by the step checks
            for value in trials.some(np.flatnonzero(allowed)):
                if trials.outcome(env, observation, actor, head, value, is_allowed=True) is _Outcome.REFUSED:
                    found = f"it allows {head}={value}, but the environment always marks it as invalid."
                    report.add("mask-illegal", where, found)
            outcomes = forbidden.setdefault((where, head), {})
            for value in trials.some(np.flatnonzero(~allowed)):
                outcomes.setdefault(trials.outcome(env, observation, actor, head, value, is_allowed=False), value)
        observation, _, done, _ = env.step(act(actor, observation))
        if done:
            observation = env.reset()
    topics = env.context.event_service.topics
    has_event = any("invalid" in name for topic in topics for name in event_methods(topic))
    for (where, head), outcomes in forbidden.items():
        if _Outcome.EXECUTED not in outcomes:
            continue
        found = f"{head}={outcomes[_Outcome.EXECUTED]}, which the environment executes like any other action"
        if _Outcome.REFUSED in outcomes or is_invalid is not looks_invalid or has_event:
            report.add("mask-legal", where, f"it forbids {found}.")
        else:
            report.skip(
                f"forbidden actions, {where}",
                f"it forbids {found}, so it is unknown whether it has to; `check_env(..., is_invalid=...)` decides",
            )


def _signals(env: Any, transition: Transition) -> set[Any]:
    """Return the entries of the info, and the events, of a sub-step."""
    return {event.interface_method.__qualname__ for event in env.get_step_events()} | set(transition.info or ())


class _Trials:
    """Try actions in a clone.

    :param subject: The environment that is checked.
    :param is_invalid: Whether an action in a completed step was invalid.
    """

    def __init__(self, subject: _Subject, is_invalid: IsInvalid) -> None:
        self._clone = subject.other()
        self._act = RandomActor(self._clone, subject.seed, subject.masks)
        self._rng = np.random.default_rng(subject.seed)
        self._is_invalid = is_invalid
        env = subject.make_env()
        usual = (_signals(env, transition) for transition in subject.play(env, subject.n_steps))
        # Signals that occur with allowed actions.
        self._usual = set[Any]().union(*usual)

    def some(self, values: np.ndarray) -> list[int]:
        """Draw some of the values."""
        return [int(value) for value in self._rng.permutation(values)[:_N_ACTIONS]]

    def outcome(self, env: Any, observation: Any, actor: Any, head: str, value: int, *, is_allowed: bool) -> _Outcome:
        """Return the strongest effect of an action over several continuations of its step.

        :param is_allowed: Whether the mask allows it; unusual signals of others mean that they are refused.
        """
        strongest = _Outcome.REFUSED
        for _ in range(_N_TRIALS):
            # An environment may refuse an impossible action by raising; other errors are found by the step checks.
            with contextlib.suppress(Exception):
                strongest = max(strongest, self._tried(env, observation, actor, head, value, is_allowed))
            if strongest is _Outcome.EXECUTED or (is_allowed and strongest):
                break
        return strongest

    def _tried(self, env: Any, observation: Any, actor: Any, head: str, value: int, is_allowed: bool) -> _Outcome:
        """Return the effect of an action followed by random ones."""
        clone = self._clone
        clone.clone_from(env)
        clone.context.event_service.clear_events()  # of the previous trial
        transition = take(clone, actor, {**self._act(actor, observation), head: np.int64(value)})
        while not transition.is_step_complete and not transition.done:
            actor, masks = transition.next_actor, self._act.masks_by_step[transition.next_actor[0]]
            if any(not (np.asarray(transition.observation[mask]) > 0).any() for mask in masks):
                return _Outcome.REFUSED  # a dead end
            transition = take(clone, actor, self._act(actor, transition.observation))
        is_unusual = not is_allowed and not _signals(clone, transition) <= self._usual
        if is_unusual or self._is_invalid(clone, transition.reward, transition.info or {}):
            return _Outcome.REFUSED
        is_changed = not same(transition.observation, observation)
        return _Outcome.EXECUTED if is_changed else _Outcome.WITHOUT_EFFECT
