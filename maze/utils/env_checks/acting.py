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


def play(env: Any, n_steps: int, seed: int, masks: Mapping[str, str]) -> Iterator[Transition]:
    """Yield random sub-steps from the first reset on; a new episode begins when one ends."""
    env.seed(seed)
    act = RandomActor(env, seed, masks)
    observation = env.reset()
    for _ in range(n_steps):
        actor = env.actor_id()
        transition = take(env, actor, act(actor, observation))
        yield transition
        observation = env.reset() if transition.done else transition.observation


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
    "actor-rewards": "Divide the reward of the step among its actors.",
    "agent-id": "Correct agent_id or the count; -1 says that the number varies.",
    "determinism": "Draw from a generator that seed() sets, and have reset() restore everything else.",
    "done": "Return a bool.",
    "exception": "Make it work for every action of the action space.",
    "info": "Return at least {}.",
    "mask-empty": "Leave at least one action; end the episode where there is none.",
    "mask-illegal": "Mask what the environment does not accept.",
    "mask-legal": "Allow every action that is possible, or name what is meant to be left out (is_invalid=...).",
    "observation-aliasing": "Return fresh arrays, or copies.",
    "observation-dtype": "Declare the Box with dtype=np.float32 and convert observations to it.",
    "observation-keys": "Observe what the space of the actor that acts next declares.",
    "reward": "Return a float.",
    "step-completion": "Return to the actor that started the step, or override CoreEnv.is_step_complete().",
    "substep-order": "Let each actor act once per step, or say by CoreEnv.is_step_complete() when a step is complete.",
}
"""Remedy for each kind of finding that has only one."""


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

    def add(self, check: str, where: str, found: str, fix: str = "") -> None:
        """Add a finding; further findings of the same kind and place are dropped.

        :param check: Kind of fault.
        :param where: Place within the environment; may be empty.
        :param found: What was expected and found.
        :param fix: Remedy; empty: the entry of `REMEDIES` for the kind.
        """
        place = f"{self.env_name}, {where}" if where else self.env_name
        if all((finding.check, finding.place) != (check, place) for finding in self.findings):
            self.findings.append(Finding(check, place, found, fix or REMEDIES[check]))

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


_N_STEPS_BEFORE = 25
"""Sub-steps before a copy is made: an odd number, so that copies are made in mid-step as well."""


def check_determinism(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> None:
    """Compare two environments with the same seed, and one environment that is seeded twice."""
    first, second = make_env(), make_env()
    expected = list(play(first, n_steps, seed, masks))
    for who, env in (("another environment with the same seed", second), ("the environment, seeded again", first)):
        found = difference(expected, list(play(env, n_steps, seed, masks)))
        if found:
            report.add("determinism", found, f"{who}, differs under the same actions.")
    first.close()
    second.close()


def check_pickling(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> None:
    """Check that an unpickled environment continues as the original does."""
    env = make_env()
    observation = _advance(env, seed, masks)
    try:
        twin = pickle.loads(pickle.dumps(env))
    except Exception as error:
        report.add(
            "pickling",
            "",
            f"cannot be pickled ({describe(error)}).",
            "Keep lambdas, open files and sockets out of it, or leave them out in __getstate__.",
        )
        return
    found = _first_difference(env, twin, observation, min(n_steps, 50), seed, masks)
    if found:
        report.add(
            "pickling",
            found,
            "the unpickled environment behaves differently.",
            "Store the whole state in __getstate__.",
        )


def check_cloning(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> bool:
    """Check that a clone continues as the original does; return whether it does."""
    env, twin = make_env(), make_env()
    observation = _advance(env, seed, masks)
    twin.seed(seed + 1)
    twin.reset()
    try:
        twin.clone_from(env)
    except NotImplementedError as error:
        report.skip("cloning, and what masks say", describe(error))
        return False
    except Exception as error:
        report.add("cloning", "clone_from()", f"raised {describe(error)}.", "Take over the whole state of the other.")
        return False
    found = _first_difference(env, twin, observation, min(n_steps, 50), seed, masks)
    if found:
        report.add(
            "cloning", found, "the clone behaves differently.", "Take over the whole state, random generators included."
        )
    return not found


_N_FUTURES = 4
"""Futures, and episodes, that are compared with each other."""


def check_futures(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> None:
    """Copies with the same new future take the same course; notes whether other futures bring other courses."""
    env, one, other = make_env(), make_env(), make_env()
    observation = _advance(env, seed, masks)
    for twin in (one, other):
        twin.seed(seed + 1)
        twin.reset()

    def difference_of(first: int, second: int) -> str | None:
        for twin, future in ((one, first), (other, second)):
            twin.clone_from(env)
            twin.new_future(future)
        return _first_difference(one, other, observation, min(n_steps, 50), seed, masks)

    try:
        found = difference_of(1, 1)
        if found:
            fix = "Have CoreEnv.new_future(seed) set every random generator that the running episode draws from."
            report.add("futures", found, "two copies with the same new future go different ways.", fix)
        report.has_chance = any(difference_of(1, future) for future in range(2, 2 + _N_FUTURES))
    except (NotImplementedError, EnvironmentContractError) as error:
        report.skip("new futures", describe(error))
        return
    except Exception as error:
        fix = "Have CoreEnv.new_future(seed) replace the random numbers of the running episode."
        report.add("futures", "new_future()", f"raised {describe(error)}.", fix)
        return
    if not report.has_chance and _is_chance_hidden(make_env(), n_steps, seed, masks):
        report.skip(
            "new futures",
            "new_future() changes nothing, although episodes that begin alike take different courses; planning would "
            "know the future. Where seed() takes effect with the next reset only, or the future is drawn in advance, "
            "override CoreEnv.new_future(seed)",
        )


def has_chance(env: Any, seed: int = 1, n_steps: int = 50) -> bool:
    """Whether episodes take another course under the same actions when their random numbers are replaced.

    :param env: The environment; random actions are taken in it.
    :param seed: Seed of the episode and its actions.
    :param n_steps: Sub-steps of the episode.
    """

    def course(future: int) -> list[Transition]:
        env.seed(seed)
        observation = env.reset()
        env.new_future(future)
        act = RandomActor(env, seed, {})
        transitions: list[Transition] = []
        while len(transitions) < n_steps and not (transitions and transitions[-1].done):
            actor = env.actor_id()
            transitions.append(copy.deepcopy(take(env, actor, act(actor, observation))))
            observation = transitions[-1].observation
        return transitions

    first = course(1)
    others = (course(future) for future in range(2, 2 + _N_FUTURES))
    return any(len(other) != len(first) or difference(first, other) is not None for other in others)


def _is_chance_hidden(env: Any, n_steps: int, seed: int, masks: Mapping[str, str]) -> bool:
    """Whether episodes that begin with the same observation differ later under the same actions."""
    courses: list[tuple[Any, list[Transition]]] = []
    for episode in range(_N_FUTURES):
        env.seed(seed + episode)
        act = RandomActor(env, seed, masks)
        first = observation = env.reset()
        course: list[Transition] = []
        while len(course) < min(n_steps, 50) and not (course and course[-1].done):
            actor = env.actor_id()
            course.append(take(env, actor, act(actor, observation)))
            observation = course[-1].observation
        for other_first, other in courses:
            n_common = min(len(course), len(other))
            if same(first, other_first) and difference(other[:n_common], course[:n_common]):
                return True
        courses.append((copy.deepcopy(first), copy.deepcopy(course)))
    return False


def _advance(env: Any, seed: int, masks: Mapping[str, str]) -> Any:
    """Take some random sub-steps and return the observation of the next actor."""
    env.seed(seed)
    act = RandomActor(env, seed, masks)
    observation = env.reset()
    for _ in range(_N_STEPS_BEFORE):
        observation, _, done, _ = env.step(act(env.actor_id(), observation))
        if done:
            observation = env.reset()
    return observation


def _first_difference(
    env: Any, twin: Any, observation: Any, n_steps: int, seed: int, masks: Mapping[str, str]
) -> str | None:
    """Take the same actions in both environments until an episode ends; describe the first difference."""
    act = RandomActor(env, seed, masks)
    expected: list[Transition] = []
    found: list[Transition] = []
    for _ in range(n_steps):
        actor = env.actor_id()
        action = act(actor, observation)
        expected.append(take(env, actor, action))
        try:
            found.append(take(twin, twin.actor_id(), action))
        except Exception as error:
            return f"sub-step {actor[0]!r}, which raised {describe(error)}"
        if difference(expected[-1:], found[-1:]) or expected[-1].done:
            break
        observation = expected[-1].observation
    return difference(expected, found)
