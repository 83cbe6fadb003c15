"""Acting with any policy in the environments of a vector environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import HiddenStates, Policy, acting_in
from maze.core.env.faults import LONG_EPISODE, Place, check_episode_ends, failure_of_acting
from maze.core.env.space_values import zeros
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, EnvironmentContractError, NonFiniteError

Row = dict[str, np.ndarray]
Rows = Mapping[StepKeyType, Row]
"""Arrays `[n_envs, ...]` by sub-step key and key."""

ActingFunction = Callable[[Row, ActorID, Row, "Row | None", "Sequence[int] | None"], None]
"""Observations, actor, arrays for actions and logits, and indices of the environments (None: all)."""


def act_by_actor(
    act: ActingFunction,
    actors: Sequence[ActorID],
    observations: Rows,
    actions: Rows,
    logits: Mapping[StepKeyType, Row | None] | None = None,
) -> dict[StepKeyType, Row]:
    """Compute the actions of all environments, with one call of the policy for each actor.

    :param act: The policy, see :func:`acting_function`.
    :param actors: The acting actors, by environment.
    :param observations: Their observations.
    :param actions: Arrays that their actions are written into.
    :param logits: Arrays that the logits are written into; `None`: logits are not written.
    :return: The actions at the sub-steps that environments are at.
    """
    first = actors[0]
    logits = logits or {}
    if actors.count(first) == len(actors):
        step_key = first.step_key
        act(observations[step_key], first, actions[step_key], logits.get(step_key), None)
        return {step_key: actions[step_key]}
    groups: dict[ActorID, list[int]] = {}
    for index, actor in enumerate(actors):
        groups.setdefault(actor, []).append(index)
    for actor, env_indices in groups.items():
        targets = actions[actor.step_key], logits.get(actor.step_key)
        seen, chosen, of_logits = (
            None if row is None else {key: array[env_indices] for key, array in row.items()}
            for row in (observations[actor.step_key], *targets)
        )
        act(seen, actor, chosen, of_logits, env_indices)  # type: ignore[arg-type]  # only logits may be None
        for target, source in zip(targets, (chosen, of_logits), strict=True):
            for key, array in (source or {}).items():
                target[key][env_indices] = array  # type: ignore[index]  # there is a target for each source
    return {actor.step_key: actions[actor.step_key] for actor in groups}


def acting_function(
    policy: Policy, env: Any, deterministic: bool = False, hidden_states: HiddenStates | None = None
) -> ActingFunction:
    """Return a function that writes the actions for a batch of observations.

    :param policy: Evaluated for all environments at once where it has `compute_actions`, else one by one.
    :param env: The vector environment, for policies that need states or environments.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    :param hidden_states: Hidden states of a recurrent policy; `None`: all environments have just been reset.
    :raises ConfigError: The policy needs environments that are in other processes.
    """
    compute_actions: Any = getattr(policy, "compute_actions", None)
    if hidden_states is None and getattr(policy, "is_recurrent", False):
        hidden_states = HiddenStates(env.n_envs, policy.state_sizes)  # type: ignore[attr-defined]  # recurrent ones have them
    if compute_actions is not None:

        def act_at_once(
            observation: Row, actor: ActorID, out: Row, logits_out: Row | None, env_indices: Sequence[int] | None
        ) -> None:
            try:
                if hidden_states is None:
                    compute_actions(observation, actor, deterministic, out=out, logits_out=logits_out)
                else:
                    choose = partial(compute_actions, observation, actor, deterministic, out, logits_out)
                    hidden_states.act(env, actor, env_indices, choose)
            except (NonFiniteError, EnvironmentContractError) as error:
                place = partial(_place_of_row, env, actor, env_indices)
                named = failure_of_acting(error, observation, place)
                if named is error:
                    raise
                raise named from error

        return act_at_once
    envs: Any = getattr(env, "envs", None)
    if envs is None and (policy.needs_state() or policy.needs_env()):
        raise ConfigError(
            f"{type(policy).__name__} needs the environment or its state, which worker processes do not provide. "
            "Use a SequentialVectorEnv or a single environment."
        )
    act_in = [acting_in(single_env, policy, deterministic) for single_env in envs or [None] * env.n_envs]

    def act_one_by_one(
        observation: Row, actor: ActorID, out: Row, logits_out: Row | None, env_indices: Sequence[int] | None
    ) -> None:
        if logits_out is not None:
            raise ConfigError(f"{type(policy).__name__} has no logits to record; expected a TorchPolicy.")
        for row, env_index in enumerate(range(len(act_in)) if env_indices is None else env_indices):
            action = act_in[env_index]({key: array[row] for key, array in observation.items()}, actor)
            for key, array in out.items():
                array[row] = action[key]

    return act_one_by_one


class EpisodesInterrupted(KeyboardInterrupt):
    """The end of the run was requested before the episodes of an evaluation ended."""


_is_interrupted: ContextVar[Callable[[], bool]] = ContextVar("maze_is_interrupted", default=bool)


@contextmanager
def interrupted_if(is_requested: Callable[[], bool]) -> Iterator[None]:
    """Return a context in which evaluations end between two steps by :class:`EpisodesInterrupted` if requested.

    :param is_requested: Called after each step of an evaluation in this thread.
    """
    token = _is_interrupted.set(is_requested)
    try:
        yield
    finally:
        _is_interrupted.reset(token)


def check_interrupt() -> None:
    """Raise :class:`EpisodesInterrupted` if the end of the run is requested, see :func:`interrupted_if`."""
    if _is_interrupted.get()():
        raise EpisodesInterrupted


def play_episodes(policy: Policy, env: Any, episode_budget: np.ndarray, deterministic: bool = False) -> None:
    """Play complete episodes in all environments, beginning with a reset.

    :param policy: The policy.
    :param env: The vector environment; its epoch statistics count these episodes.
    :param episode_budget: Number of episodes of each environment, `[n_envs]`; counted down.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    """
    act = acting_function(policy, env, deterministic)
    observations = zeros(env.observation_spaces_dict, (env.n_envs,), "observation")
    actions = zeros(env.action_spaces_dict, (env.n_envs,), "action")
    try:
        env.episode_budget = np.zeros(env.n_envs, np.int64)  # unfinished episodes do not count
        env.reset(out=observations)
        env.episode_budget = episode_budget
        n_ticks = 0
        while episode_budget.any():
            env.step(act_by_actor(act, env.actor_ids(), observations, actions), out=observations)
            n_ticks += 1
            check_interrupt()
            if n_ticks % LONG_EPISODE == 0:
                n_steps = np.where(episode_budget > 0, env.get_env_time(), 0)
                check_episode_ends(int(n_steps.max()), f"evaluation environment {n_steps.argmax()}")
    finally:
        env.episode_budget = None


def logits_shapes_of(
    policy: Policy | None, action_spaces_dict: Mapping[StepKeyType, spaces.Dict]
) -> dict[StepKeyType, dict[str, Sequence[int]]]:
    """Return shapes of a policy's logits by sub-step key and action key.

    :param policy: A policy with a distribution mapper.
    :param action_spaces_dict: Action spaces by sub-step key.
    :raises ConfigError: The policy has no logits.
    """
    mapper = getattr(policy, "distribution_mapper", None)
    if mapper is None:
        raise ConfigError(f"{type(policy).__name__} has no logits to record; expected a TorchPolicy.")
    return {  # of the environment's spaces: policies that score candidates act in smaller and larger ones as well
        step_key: {
            head: tuple(mapper.distribution_class(head).required_logits_shape(part))
            for head, part in space.spaces.items()
        }
        for step_key, space in action_spaces_dict.items()
    }


def _place_of_row(env: Any, actor: ActorID, env_indices: Sequence[int] | None, row: int) -> Place:
    index = row if env_indices is None else env_indices[row]
    n_steps = int(env.get_env_time()[index])
    return Place(f"environment {index}", actor, n_steps, env.seeding_at(index, 0))
