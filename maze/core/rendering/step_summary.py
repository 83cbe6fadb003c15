"""Textual summaries of recorded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from maze.core.env.base_env import is_truncated

if TYPE_CHECKING:
    from maze.core.env.structured_env import ActorID
    from maze.core.trajectory_recording.records.state_record import StateRecord
    from maze.core.trajectory_recording.records.trajectory_record import StateTrajectoryRecord

_LONGEST = 400
_DEFAULT_REPR: Any = object.__repr__


class StepSummary(NamedTuple):
    """Textual summary of a step.

    :param env_time: Environment time.
    :param actor: The actor, if the simulation has several; otherwise empty.
    :param state: The state.
    :param action: The action of the simulation.
    :param reward: Reward of the step; None for the last state.
    :param total: Sum of the rewards up to and including this step.
    :param outcome: "terminated" or "truncated" for the step that ended the episode, otherwise empty.
    :param events: Pairs of an event's name and its attributes.
    """

    env_time: int
    actor: str
    state: str
    action: str
    reward: float | None
    total: float
    outcome: str
    events: list[tuple[str, str]]


def step_summaries(episode_record: StateTrajectoryRecord) -> list[StepSummary]:
    """Return a summary of each step of an episode."""
    summaries: list[StepSummary] = []
    total = 0.0
    for index, record in enumerate(episode_record.step_records):
        reward = None if record.reward is None else float(np.sum(record.reward))
        total += reward or 0.0
        env_time = index if record.env_time is None else record.env_time
        action = "" if record.maze_action is None else text_of(record.maze_action)
        state, actor = text_of(record.maze_state), actor_text(record.actor_id)
        summaries.append(StepSummary(env_time, actor, state, action, reward, total, _outcome(record), _events(record)))
    return summaries


def actor_text(actor: ActorID | None) -> str:
    """Return the text of an actor; empty if there is only one."""
    return "" if actor is None else f"sub-step {actor.step_key}, agent {actor.agent_id}"


def text_of(value: Any) -> str:
    """Return a value as short text; objects with the default `repr` by their attributes."""
    if isinstance(value, np.ndarray) and value.size > 64:
        text = f"array of shape {value.shape}, {value.dtype}, from {value.min():.4g} to {value.max():.4g}"
    elif isinstance(value, np.ndarray):
        text = np.array2string(value, precision=4, separator=", ")
    elif isinstance(value, dict):
        text = ", ".join(f"{key}: {text_of(entry)}" for key, entry in value.items())
    elif isinstance(value, (float, np.floating)):
        text = f"{value:.6g}"
    elif type(value).__repr__ is _DEFAULT_REPR and hasattr(value, "__dict__"):
        text = f"{type(value).__name__}({text_of(vars(value))})"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _outcome(record: StateRecord) -> str:
    if not record.done:
        return ""
    return "truncated" if is_truncated(record.done, record.info or {}) else "terminated"


def _events(record: StateRecord) -> list[tuple[str, str]]:
    if record.step_event_log is None:
        return []
    return [
        (
            event.qualified_name,
            ", ".join(f"{name}={text_of(value)}" for name, value in event.attributes.items()),
        )
        for event in record.step_event_log.events
    ]
