"""Whether masks allow what is possible and forbid what is not, tried out with clones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maze.utils.env_checks.acting import RandomActor, Transition, take
from maze.utils.env_checks.findings import CheckReport

IsInvalid = Callable[[Any, float, Mapping[Any, Any]], bool]

_N_STATES = 12
_N_TRIALS = 8
"""Continuations tried before an action counts as impossible."""
_N_ACTIONS = 12
"""Allowed and forbidden actions tried in each state."""


def looks_invalid(env: Any, reward: float, info: Mapping[Any, Any]) -> bool:
    """Whether the step just completed tells by its info or its events that the action was not possible."""
    if "error" in info:
        return True
    return any("invalid" in event.interface_method.__name__ for event in env.get_step_events())


def check_masks(
    report: CheckReport,
    make_env: Callable[[], Any],
    n_steps: int,
    seed: int,
    masks: Mapping[str, str],
    is_invalid: IsInvalid,
) -> None:
    """Tries allowed and forbidden actions in clones of states that random actions lead to."""
    env, clone = make_env(), make_env()
    act = RandomActor(env, seed, masks)
    if not any(act.masks_by_step.values()):
        return
    trials = _Trials(clone, seed, masks, is_invalid)
    env.seed(seed)
    clone.seed(seed)
    observation = env.reset()
    clone.reset()
    n_states: dict[Any, int] = {}
    for _ in range(n_steps):
        actor = env.actor_id()
        if n_states.setdefault(actor[0], 0) < _N_STATES:
            n_states[actor[0]] += 1
            for mask, head in act.masks_by_step[actor[0]].items():
                _check_mask(report, env, trials, actor, observation, mask, head)
        observation, _, done, _ = env.step(act(actor, observation))
        if done:
            observation = env.reset()


def _check_mask(
    report: CheckReport, env: Any, trials: _Trials, actor: Any, observation: Any, mask: str, head: str
) -> None:
    where = f"sub-step {actor[0]!r}, observation `{mask}`"
    allowed = np.asarray(observation[mask]) > 0
    if not allowed.any():
        return  # found already
    for value in trials.some(np.flatnonzero(allowed)):
        if not trials.is_possible(env, observation, actor, head, value):
            report.add(
                "mask-illegal",
                where,
                f"it allows {head}={value}, but the environment calls it invalid, whatever follows.",
                "Mask what the environment does not accept.",
            )
            break
    for value in trials.some(np.flatnonzero(~allowed)):
        if trials.is_possible(env, observation, actor, head, value):
            report.add(
                "mask-legal",
                where,
                f"it forbids {head}={value}, which the environment accepts.",
                "Allow every action that is possible, or name what is meant to be left out (is_invalid=...).",
            )
            break


class _Trials:
    """Tries actions out in a clone.

    :param clone: Environment to clone states into.
    :param masks: Which action each mask is for, where their sizes do not tell.
    :param is_invalid: Says of a completed step whether an action in it was invalid.
    """

    def __init__(self, clone: Any, seed: int, masks: Mapping[str, str], is_invalid: IsInvalid) -> None:
        self._clone = clone
        self._act = RandomActor(clone, seed, masks)
        self._rng = np.random.default_rng(seed)
        self._is_invalid = is_invalid

    def some(self, values: np.ndarray) -> list[int]:
        """A few of the values."""
        return [int(value) for value in self._rng.permutation(values)[:_N_ACTIONS]]

    def is_possible(self, env: Any, observation: Any, actor: Any, head: str, value: int) -> bool:
        """Whether the environment accepts the action with at least one continuation of the step."""
        return any(self._is_accepted(env, observation, actor, head, value) for _ in range(_N_TRIALS))

    def _is_accepted(self, env: Any, observation: Any, actor: Any, head: str, value: int) -> bool:
        clone = self._clone
        clone.clone_from(env)
        clone.context.event_service.clear_events()  # those of the trial before
        action = {**self._act(actor, observation), head: np.int64(value)}
        try:
            transition = take(clone, actor, action)
            while not transition.is_step_complete and not transition.done:
                if self._has_no_way_on(transition, clone.actor_id()):
                    return False
                following = clone.actor_id()
                transition = take(clone, following, self._act(following, transition.observation))
        except Exception:
            # An environment may refuse an impossible action by raising; other errors were found before.
            return False
        info = transition.info if isinstance(transition.info, Mapping) else {}
        return not self._is_invalid(clone, transition.reward, info)

    def _has_no_way_on(self, transition: Transition, actor: Any) -> bool:
        masks = self._act.masks_by_step[actor[0]]
        return any(not (np.asarray(transition.observation[mask]) > 0).any() for mask in masks)
