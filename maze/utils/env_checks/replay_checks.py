"""Whether an environment can be repeated, stored and cloned."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

from maze.utils.env_checks.acting import CheckReport, RandomActor, Transition, describe, difference, play, take

_N_STEPS_BEFORE = 25
"""Sub-steps before a copy is made: an odd number, so that copies are made in mid-step as well."""


def check_determinism(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> None:
    """Two environments with the same seed, and one that is seeded again."""
    first, second = make_env(), make_env()
    expected = play(first, n_steps, seed, masks)
    for who, env in (("another environment with the same seed", second), ("the environment, seeded again", first)):
        found = difference(expected, play(env, n_steps, seed, masks))
        if found:
            report.add(
                "determinism",
                found,
                f"{who}, goes another way under the same actions.",
                "Draw from a generator that seed() sets, and have reset() restore everything else.",
            )
    first.close()
    second.close()


def check_pickling(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> None:
    """A pickled environment goes on as the original does."""
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
            "pickling", found, "the unpickled environment goes another way.", "Store the whole state in __getstate__."
        )


def check_cloning(
    report: CheckReport, make_env: Callable[[], Any], n_steps: int, seed: int, masks: Mapping[str, str]
) -> bool:
    """A clone goes on as the original does; whether there are clones at all."""
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
            "cloning", found, "the clone goes another way.", "Take over the whole state, random generators included."
        )
    return not found


def _advance(env: Any, seed: int, masks: Mapping[str, str]) -> Any:
    """Some random sub-steps; the observation of the next actor."""
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
    """Gives both the same actions until their episode ends."""
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
