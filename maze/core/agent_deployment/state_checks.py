"""Checks of what the real system reports, before anything is done with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from maze.core.agent_deployment.external_core_env import StateUpdate
from maze.core.env.maze_state import MazeStateType
from maze.core.errors import EnvironmentContractError, NonFiniteError
from maze.core.events.event_record import EventRecord


def checked_update(
    method: str,
    n_steps: int,
    maze_state: MazeStateType,
    reward: Any,
    done: bool,
    info: Any,
    events: Any,
    is_step_complete: bool | None,
    is_last: bool = False,
) -> StateUpdate:
    """The report of a state, or an error that says what is wrong with it.

    :param method: The method that it was given to.
    :param n_steps: Actions of the episode so far.
    :param is_last: Whether the episode ends with it.
    """
    where = f"{method}, after {n_steps} actions of the episode"
    if n_steps:
        _check_reward(reward, where)
    if info is None:
        info = {}
    elif not isinstance(info, Mapping):
        raise EnvironmentContractError(f"{where}: `info` must be a mapping or None, got {info!r}.")
    for event in events or ():
        if not isinstance(event, EventRecord):
            raise EnvironmentContractError(
                f"{where}: `events` must hold EventRecords, got {event!r}. Make them by EventRecord(Interface, "
                f"Interface.event, attributes)."
            )
    return StateUpdate(maze_state, reward, done, info, events or (), is_step_complete, is_last)


def _check_reward(reward: Any, where: str) -> None:
    """The reward of an action is one number, or an array with one for each actor."""
    if isinstance(reward, np.ndarray) and reward.dtype.kind in "iufb":
        is_finite = bool(np.isfinite(reward).all())
    else:
        try:
            is_finite = math.isfinite(reward)
        except TypeError:
            raise EnvironmentContractError(
                f"{where}: `reward` must be the number that the last action earned (only an episode's first state has "
                f"none), got {reward!r}."
            ) from None
    if not is_finite:
        raise NonFiniteError(f"{where}: `reward` is {reward}.")
