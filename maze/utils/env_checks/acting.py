"""Random masked actions, the report of findings, and the checks of determinism, pickling and cloning."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from maze.core.agent.random_policy import RandomPolicy, masked_heads
from maze.core.errors import EnvironmentContractError


@dataclass(frozen=True)
class Transition:
    """One sub-step."""

    actor: Any
    action: Any
    observation: Any
    reward: Any
    done: Any
    info: Any
    is_step_complete: bool
    next_actor: Any


class RandomActor:
    """Sample actions uniformly from those that masks allow.

    :param env: Environment whose spaces are sampled; the random generators of the spaces are not used.
    :param seed: Seed of the actions.
    :param masks: Action head of each mask that its size does not determine.
    """

    def __init__(self, env: Any, seed: int, masks: Mapping[str, str]) -> None:
        self.masks_by_step = {key: masked_actions(env, key, masks)[0] for key in env.action_spaces_dict}
        self._policy = RandomPolicy(env.action_spaces_dict, masks)
        self._policy.seed(seed)

    def sample(self, actor: Any) -> dict[str, Any]:
        """Sample an action that masks may forbid."""
        return dict(self._policy.compute_action(None, actor_id=actor))

    def __call__(self, actor: Any, observation: Any) -> dict[str, Any]:
        """Sample an action that masks allow."""
        return dict(self._policy.compute_action(observation, actor_id=actor))


def masked_actions(env: Any, step_key: Any, masks: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return the masks of a sub-step with their action heads, and the masks that fit several heads."""
    shapes = {key: space.shape or () for key, space in env.observation_spaces_dict[step_key].items()}
    return masked_heads(shapes, env.action_spaces_dict[step_key], masks)


def take(env: Any, actor: Any, action: Any) -> Transition:
    """Take one sub-step."""
    context = getattr(env, "context", None)
    if context is not None:
        context.pre_step()  # a wrapper may take the first sub-steps of a step itself
    observation, reward, done, info = env.step(action)
    is_step_complete = context is None or context.is_step_complete
    return Transition(actor, action, observation, reward, done, info, bool(is_step_complete), env.actor_id())


def course(env: Any, observation: Any, act: RandomActor, n_steps: int) -> Iterator[Transition]:
    """Yield random sub-steps until the episode ends.

    :param observation: The observation of the next actor.
    :param n_steps: Largest number of sub-steps.
    """
    for _ in range(n_steps):
        actor = env.actor_id()
        transition = take(env, actor, act(actor, observation))
        yield transition
        if transition.done:
            return
        observation = transition.observation


def play(env: Any, n_steps: int, seed: int, masks: Mapping[str, str]) -> Iterator[Transition]:
    """Yield random sub-steps from the first reset on; a new episode begins when one ends."""
    env.seed(seed)
    act, n_left = RandomActor(env, seed, masks), n_steps
    while n_left > 0:
        for transition in course(env, env.reset(), act, n_left):
            n_left -= 1
            yield transition


def difference(first: list[Transition], second: list[Transition]) -> str | None:
    """Describe the first difference between two sequences of sub-steps."""
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        for name in ("actor", "reward", "done", "observation"):
            if not same(getattr(one, name), getattr(other, name)):
                detail = _different_key(one.observation, other.observation) if name == "observation" else ""
                actor = one.next_actor if name == "observation" else one.actor
                return f"sub-step {actor[0]!r}, {name}{detail}, at the {index + 1}. sub-step"
    return None


def _different_key(one: Any, other: Any) -> str:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return next((f" `{key}`" for key in one if not same(one[key], other.get(key))), "")
    return ""


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
    if first.shape != second.shape:
        return False
    if np.issubdtype(first.dtype, np.floating) and np.issubdtype(second.dtype, np.floating):
        return bool(np.array_equal(first, second, equal_nan=True))
    return bool(np.array_equal(first, second))


def describe(error: BaseException) -> str:
    """Describe an exception in one line."""
    return f"{type(error).__name__}: {error}".split("\n", maxsplit=1)[0]


def report_exception(report: CheckReport, where: str, error: BaseException) -> None:
    """Add an exception that the environment raised as a finding."""
    report.add("exception", where, f"raised {describe(error)}.")


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


@dataclass(frozen=True)
class Finding:
    """One fault."""

    check: str
    """Kind of fault, such as `observation-space`."""
    place: str
    """Environment, sub-step and key."""
    found: str
    """What is wrong: expected and found."""
    fix: str
    """Remedy."""

    def __str__(self) -> str:
        return f"[{self.check}] {self.place}: {self.found} {self.fix}"


@dataclass
class CheckReport:
    """Findings on an environment, and the checks that were skipped."""

    env_name: str
    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Checks that were not possible, with their reasons."""
    n_steps: int = 0
    """Sub-steps taken."""
    has_chance: bool | None = None
    """Whether copies of a state with other futures take other courses; None: copies could not be made."""

    def add(self, check: str, where: str, found: str) -> None:
        """Add a finding; further findings of the same kind and place are dropped.

        :param check: Kind of fault, one of `REMEDIES`.
        :param where: Place within the environment; may be empty.
        :param found: What was expected and found.
        """
        place = f"{self.env_name}, {where}" if where else self.env_name
        if all((finding.check, finding.place) != (check, place) for finding in self.findings):
            self.findings.append(Finding(check, place, found, REMEDIES[check]))

    def skip(self, what: str, why: str) -> None:
        """Note that something was not checked."""
        note = f"{what}: {why}"
        if note not in self.skipped:
            self.skipped.append(note)

    def __str__(self) -> str:
        lines = [f"{self.env_name}: {len(self.findings)} finding(s) in {self.n_steps} sub-steps."]
        lines += [f"  {finding}" for finding in self.findings]
        if self.has_chance is not None:
            chance = "bring other courses (there is chance)" if self.has_chance else "all take the same course"
            lines.append(f"  Copies of a state with new futures {chance}.")
        lines += [f"  (not checked) {note}" for note in self.skipped]
        return "\n".join(lines)


@dataclass(frozen=True)
class Subject:
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

    def played(self, env: Any) -> list[Transition]:
        """Play random sub-steps."""
        return list(play(env, self.n_steps, self.seed, self.masks))

    def begun(self) -> tuple[Any, Any]:
        """Return an environment within an episode, and the observation of its next actor."""
        env = self.make_env()
        *_, last = play(env, _N_STEPS_BEFORE, self.seed, self.masks)
        return env, env.reset() if last.done else last.observation

    def other(self) -> Any:
        """Return an environment in another state."""
        env = self.make_env()
        env.seed(self.seed + 1)
        env.reset()
        return env

    def first_difference(self, env: Any, twin: Any, observation: Any) -> str | None:
        """Take the same actions in both environments until an episode ends; describe the first difference."""
        act = RandomActor(env, self.seed, self.masks)
        for expected in course(env, observation, act, min(self.n_steps, _N_STEPS_AFTER)):
            try:
                found = take(twin, twin.actor_id(), expected.action)
            except Exception as error:
                return f"sub-step {expected.actor[0]!r}, which raised {describe(error)}"
            if different := difference([expected], [found]):
                return different
        return None


_N_STEPS_BEFORE, _N_STEPS_AFTER = 25, 50
"""Sub-steps before a copy is made, an odd number so that copies are made in mid-step as well, and after it."""
_N_FUTURES = 4
"""Futures, and episodes, that are compared with each other."""


def check_determinism(subject: Subject) -> None:
    """Compare two environments with the same seed, and one environment that is seeded twice."""
    first, second = subject.make_env(), subject.make_env()
    expected = subject.played(first)
    for who, env in (("another environment with the same seed", second), ("the environment, seeded again", first)):
        if found := difference(expected, subject.played(env)):
            subject.report.add("determinism", found, f"{who}, differs under the same actions.")
        env.close()


def check_pickling(subject: Subject) -> None:
    """Check that an unpickled environment continues as the original does."""
    env, observation = subject.begun()
    try:
        twin = pickle.loads(pickle.dumps(env))
    except Exception as error:
        subject.report.add("pickling", "", f"cannot be pickled ({describe(error)}).")
        return
    if found := subject.first_difference(env, twin, observation):
        subject.report.add("pickling", found, "the unpickled environment behaves differently.")


def check_cloning(subject: Subject) -> bool:
    """Check that a clone continues as the original does; return whether it does."""
    (env, observation), twin = subject.begun(), subject.other()
    try:
        twin.clone_from(env)
    except NotImplementedError as error:
        subject.report.skip("cloning, and what masks say", describe(error))
        return False
    except Exception as error:
        subject.report.add("cloning", "clone_from()", f"raised {describe(error)}.")
        return False
    found = subject.first_difference(env, twin, observation)
    if found:
        subject.report.add("cloning", found, "the clone behaves differently.")
    return not found


def check_futures(subject: Subject) -> None:
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
        report.has_chance = any(difference_of(1, future) for future in range(2, 2 + _N_FUTURES))
    except (NotImplementedError, EnvironmentContractError) as error:
        report.skip("new futures", describe(error))
        return
    except Exception as error:
        report.add("futures", "new_future()", f"raised {describe(error)}.")
        return
    if not report.has_chance and _is_chance_hidden(subject):
        report.skip(
            "new futures",
            "new_future() changes nothing, although episodes that begin alike take different courses; planning would "
            "know the future. Where seed() takes effect with the next reset only, or the future is drawn in advance, "
            "override CoreEnv.new_future(seed)",
        )


def has_chance(env: Any, seed: int = 1, n_steps: int = 50) -> bool:
    """Return whether episodes take another course under the same actions when their random numbers are replaced.

    :param env: The environment; random actions are taken in it.
    :param seed: Seed of the episode and its actions.
    :param n_steps: Sub-steps of the episode.
    """
    courses = []
    for future in range(1, 2 + _N_FUTURES):
        env.seed(seed)
        observation = env.reset()
        env.new_future(future)
        courses.append([copy.deepcopy(each) for each in course(env, observation, RandomActor(env, seed, {}), n_steps)])
    first, *others = courses
    return any(len(other) != len(first) or difference(first, other) is not None for other in others)


def _is_chance_hidden(subject: Subject) -> bool:
    """Return whether episodes that begin with the same observation differ later under the same actions."""
    env = subject.make_env()
    courses: list[tuple[Any, list[Transition]]] = []
    for episode in range(_N_FUTURES):
        env.seed(subject.seed + episode)
        act = RandomActor(env, subject.seed, subject.masks)
        first = copy.deepcopy(env.reset())
        n_steps = min(subject.n_steps, _N_STEPS_AFTER)
        ours = [copy.deepcopy(each) for each in course(env, first, act, n_steps)]
        for other_first, other in courses:
            n_common = min(len(ours), len(other))
            if same(first, other_first) and difference(other[:n_common], ours[:n_common]):
                return True
        courses.append((first, ours))
    return False
