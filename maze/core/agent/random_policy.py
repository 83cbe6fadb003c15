"""Act at random."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy, for_actor
from maze.core.annotations import override
from maze.core.env.action_conversion import CANDIDATES_SUFFIX, drawn_value, masks_of_heads
from maze.core.env.structured_env import ActorID, StepKeyType


class RandomPolicy(Policy):
    """Draw all actions uniformly from the action spaces (unbounded ones: as gymnasium does).

    Heads with an action mask among the observations are sampled from the actions that it allows (positive). The mask of
    a `Discrete` head is the observation whose name ends with `mask` and that has as many entries as the head has
    choices, where there is only one such head; that of others is `<head>_mask`, or `action_mask` of a single head, with
    an entry for each value of each choice (`MultiDiscrete`) or each bit (`MultiBinary`). A mask without a valid
    action is ignored.

    :param action_spaces_dict: Action spaces by step key. They are neither seeded nor sampled themselves.
    :param masks: Action heads by the observations that are their masks, where names and sizes are ambiguous.
    """

    def __init__(
        self, action_spaces_dict: dict[str | int, spaces.Space[Any]], masks: Mapping[str, str] | None = None
    ) -> None:
        self.action_spaces_dict = action_spaces_dict
        self.masks = dict(masks or {})
        self._samplers = {key: (space, _sampler_of(space)) for key, space in action_spaces_dict.items()}
        self._masked_heads: dict[Any, dict[str, str]] = {}
        self._rng = np.random.default_rng()

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> Any:
        space, sample = for_actor(self._samplers, actor_id, "action_spaces_dict")
        action = sample(self._rng)
        step_key = None if actor_id is None else actor_id[0]
        masks = self._masked_heads.get(step_key)
        if masks == {} or not isinstance(observation, Mapping) or not isinstance(space, spaces.Dict):
            return action
        if masks is None:
            masks = self._masked_heads[step_key] = masks_of_heads(observation, space, self.masks)
        # heads with masked choices are sampled again; masks do not change the samples of other heads
        for head, mask in masks.items():
            action[head] = drawn_value(space[head], observation[mask], self._rng.integers)
        return action

    @override(Policy)
    def compute_top_action_candidates(
        self, observation: Any, num_candidates: int | None, maze_state: Any, env: Any, actor_id: ActorID | None = None
    ) -> tuple[Sequence[Any], Sequence[float]]:
        """Return random candidates (one, if their number is left open), all equally likely."""
        n_candidates = 1 if num_candidates is None else num_candidates
        actions = [self.compute_action(observation, actor_id=actor_id) for _ in range(n_candidates)]
        return actions, [1.0 / n_candidates] * n_candidates


def _sampler_of(space: spaces.Space[Any]) -> Callable[[np.random.Generator], Any]:
    """Return a function, prepared once, that samples a space without its own generator where that is possible."""
    if isinstance(space, spaces.Dict):
        return partial(_of_heads, [(head, _sampler_of(part)) for head, part in space.spaces.items()])
    if isinstance(space, spaces.Discrete):
        return partial(_of_choices, int(space.start), int(space.start + space.n))
    if isinstance(space, spaces.Box) and space.is_bounded() and np.issubdtype(space.dtype, np.floating):
        return partial(_of_box, space.low, space.high)
    return partial(_of_copy, copy.deepcopy(space))


def _of_heads(heads: Sequence[tuple[str, Callable[..., Any]]], rng: np.random.Generator) -> dict[str, Any]:
    return {head: sample(rng) for head, sample in heads}


def _of_choices(low: int, high: int, rng: np.random.Generator) -> Any:
    return np.int64(rng.integers(low, high))


def _of_box(low: np.ndarray, high: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.uniform(low, high), low.dtype)  # without dimensions it is a number


def _of_copy(space: spaces.Space[Any], rng: np.random.Generator) -> Any:
    space.seed(int(rng.integers(2**31)))
    return space.sample()


def candidates_of(
    action_spaces_dict: Mapping[StepKeyType, spaces.Dict], observation_spaces_dict: Mapping[StepKeyType, spaces.Dict]
) -> dict[str, str]:
    """Return the observations of candidates by head, for `Discrete` heads that choose one of a varying number.

    The observation is `<head>_candidates` `[n, features]`, a row for each choice. `<head>_candidates_mask` `[n]` marks
    the rows that exist, `<head>_mask` `[n]` those that may be chosen. Learned networks depend neither on the number of
    candidates nor on their order.

    :param action_spaces_dict: Action spaces by step key.
    :param observation_spaces_dict: Observation spaces by step key.
    """
    found: dict[str, str] = {}
    for step_key, action_space in action_spaces_dict.items():
        seen = observation_spaces_dict[step_key].spaces if step_key in observation_spaces_dict else {}
        for head, space in action_space.spaces.items():
            key = f"{head}_{CANDIDATES_SUFFIX}"
            shape = tuple(seen[key].shape or ()) if key in seen else ()
            if isinstance(space, spaces.Discrete) and len(shape) == 2 and shape[0] == space.n:
                found[head] = key
    return found
