"""Asking any policy for the actions of many environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.core.agent.policy import Policy

Row = dict[str, np.ndarray]
ActingFunction = Callable[[Row, ActorID, Row, "Row | None", "Sequence[int] | None"], None]
"""Observations, actor, arrays for actions and logits, and indices of the environments (None: all)."""


def acting_function(policy: Policy, env: Any) -> ActingFunction:
    """A function that writes the actions for a batch of observations.

    :param policy: Asked for all at once if it can (`compute_actions`), else for one after another.
    :param env: The vector environment, for policies that want to see states or environments.
    """
    compute_actions: Any = getattr(policy, "compute_actions", None)
    if compute_actions is not None:

        def act_at_once(
            observation: Row, actor: ActorID, out: Row, logits_out: Row | None, _: Sequence[int] | None
        ) -> None:
            compute_actions(observation, actor, out=out, logits_out=logits_out)

        return act_at_once
    return _act_one_by_one(policy, env)


def _act_one_by_one(policy: Policy, env: Any) -> ActingFunction:
    needs_state, needs_env = policy.needs_state(), policy.needs_env()
    envs: Any = getattr(env, "envs", None)
    if (needs_state or needs_env) and envs is None:
        raise ConfigError(
            f"{type(policy).__name__} wants to see the environment or its state, which worker processes do not show. "
            "Use a SequentialVectorEnv or a single environment."
        )

    def act(
        observation: Row, actor: ActorID, out: Row, logits_out: Row | None, env_indices: Sequence[int] | None
    ) -> None:
        if logits_out is not None:
            raise ConfigError(f"{type(policy).__name__} has no logits to record; expected a TorchPolicy.")
        n_rows = len(next(iter(observation.values())))
        for row in range(n_rows):
            env_index = row if env_indices is None else env_indices[row]
            action = policy.compute_action(
                {key: array[row] for key, array in observation.items()},
                maze_state=envs[env_index].get_maze_state() if needs_state else None,
                env=envs[env_index] if needs_env else None,
                actor_id=actor,
                deterministic=False,
            )
            for key, array in out.items():
                array[row] = action[key]

    return act


def logits_shapes_of(
    policy: Policy | None, action_spaces_dict: Mapping[StepKeyType, spaces.Dict]
) -> dict[StepKeyType, dict[str, Sequence[int]]]:
    """Shapes of a policy's logits by sub-step key and action key.

    :param policy: A policy with a distribution mapper.
    :param action_spaces_dict: Action spaces by sub-step key.
    """
    mapper = getattr(policy, "distribution_mapper", None)
    if mapper is None:
        raise ConfigError(f"{type(policy).__name__} has no logits to record; expected a TorchPolicy.")
    return {
        step_key: {key: tuple(mapper.required_logits_shape(key)) for key in space}
        for step_key, space in action_spaces_dict.items()
    }
