"""Whether an environment's declarations fit each other, and observations the declarations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.utils.env_checks.findings import CheckReport


def check_declarations(report: CheckReport, env: Any) -> bool:
    """Spaces and agent counts before the first step; whether the environment can be stepped at all."""
    actions, observations = env.action_spaces_dict, env.observation_spaces_dict
    if set(actions) != set(observations):
        report.add(
            "spaces",
            "",
            f"action_spaces_dict has the sub-steps {list(actions)}, observation_spaces_dict {list(observations)}.",
            "Give each sub-step both spaces.",
        )
        return False
    for step_key in actions:
        for name, space in (("action", actions[step_key]), ("observation", observations[step_key])):
            if not isinstance(space, spaces.Dict):
                report.add(
                    "spaces",
                    f"sub-step {step_key!r}",
                    f"the {name} space must be a Dict space, but is {space}.",
                    "Name each part: spaces.Dict({name: space}).",
                )
                return False
        for key, space in observations[step_key].items():
            if isinstance(space, spaces.Box) and space.dtype == np.float64:
                report.add(
                    "observation-dtype",
                    f"sub-step {step_key!r}, observation `{key}`",
                    "its space has the type float64; networks compute with float32.",
                    "Declare the Box with dtype=np.float32 and convert observations to it.",
                )
    _check_agent_counts(report, env.agent_counts_dict, list(actions))
    return True


def _check_agent_counts(report: CheckReport, counts: Any, step_keys: list[StepKeyType]) -> None:
    is_mapping = isinstance(counts, Mapping)
    if not is_mapping or set(counts) != set(step_keys):
        report.add(
            "agent-counts",
            "agent_counts_dict",
            f"expected a number of agents for each of the sub-steps {step_keys}, found {counts!r}.",
            "Give every sub-step its number of agents, or -1 where it varies.",
        )
    elif any(isinstance(n, bool) or not isinstance(n, (int, np.integer)) or n < -1 or n == 0 for n in counts.values()):
        report.add(
            "agent-counts",
            "agent_counts_dict",
            f"expected positive numbers or -1, found {dict(counts)}.",
            "Count the agents that act in a sub-step; -1 where they vary.",
        )


def check_actor(report: CheckReport, env: Any, actor: Any) -> bool:
    """Whether the actor to act next is one that was declared."""
    if not isinstance(actor, tuple) or len(actor) != 2:
        report.add(
            "actor-id", "actor_id()", f"expected ActorID(step_key, agent_id), found {actor!r}.", "Return an ActorID."
        )
        return False
    step_key, agent_id = actor
    if step_key not in env.action_spaces_dict:
        report.add(
            "actor-id",
            "actor_id()",
            f"sub-step {step_key!r} has no spaces; known are {list(env.action_spaces_dict)}.",
            "Return a declared step key, or declare spaces and conversions for this one.",
        )
        return False
    counts = env.agent_counts_dict
    count = counts.get(step_key, -1) if isinstance(counts, Mapping) else -1
    is_whole = isinstance(agent_id, (int, np.integer)) and not isinstance(agent_id, bool)
    if not is_whole or agent_id < 0 or (count >= 0 and agent_id >= count):
        report.add(
            "agent-id",
            f"sub-step {step_key!r}",
            f"agent {agent_id!r} is to act, but agent_counts_dict promises {count} agent(s), counted from 0.",
            "Correct agent_id or the count; -1 says that the number varies.",
        )
    for name in ("action", "observation"):
        declared = getattr(env, f"{name}_spaces_dict")[step_key]
        if getattr(env, f"{name}_space") != declared:
            report.add(
                "spaces",
                f"sub-step {step_key!r}",
                f"{name}_space is not the entry of {name}_spaces_dict for the actor to act.",
                f"Return {name}_spaces_dict[actor_id().step_key].",
            )
    return True


def check_observation(report: CheckReport, env: Any, actor: ActorID, observation: Any) -> None:
    """Whether an observation is an element of its space."""
    step_key = actor[0]
    space: spaces.Dict = env.observation_spaces_dict[step_key]
    where = f"sub-step {step_key!r}"
    if not isinstance(observation, Mapping) or set(observation) != set(space):
        found = sorted(observation) if isinstance(observation, Mapping) else type(observation).__name__
        report.add(
            "observation-keys",
            where,
            f"expected a dictionary with the keys {sorted(space)}, found {found}.",
            "Observe what the space of the actor that acts next declares.",
        )
        return
    for key, entry in space.items():
        problem = _problem(np.asarray(observation[key]), entry)
        if problem:
            kind, found = problem
            report.add(
                kind,
                f"{where}, observation `{key}`",
                found,
                "Correct the conversion (`maze_to_space`) or the space it declares.",
            )


def _problem(value: np.ndarray, space: spaces.Space[Any]) -> tuple[str, str] | None:
    """Kind and description of what is wrong with a value."""
    if space.shape is not None and value.shape != space.shape:
        return "observation-space", f"expected the shape {space.shape}, found {value.shape}."
    if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
        return "observation-space", "there are values that are not finite."
    if isinstance(space, spaces.Box) and value.dtype != space.dtype:
        return "observation-dtype", f"expected values of type {space.dtype}, found {value.dtype}."
    if isinstance(space, spaces.Discrete):
        is_inside = bool(space.contains(value.item()))
    else:
        is_inside = bool(space.contains(value))
    if not is_inside:
        return "observation-space", f"values from {value.min()} to {value.max()} are not all in {space}."
    return None
