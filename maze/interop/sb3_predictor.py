"""Export of Maze policies with the `predict` method of stable-baselines3 models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.agent.policy import Policy
from maze.core.env.space_arrays import ActionBounds, split_rows
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.rollout.rollout_runner import RolloutRunner
from maze.core.utils.factory import Factory
from maze.core.wrappers.gym_adapters import action_leaves, adapted, gym_env_name
from maze.core.wrappers.maze_gym_env_wrapper import GymActionConversion, GymObservationConversion


class SB3Predictor:
    """A policy with the `predict` method of stable-baselines3 models: for `evaluate_policy`, `VecVideoRecorder`, ...

    :param policy: A policy that needs observations only.
    :param actor_id: The actor that it acts for.
    :param shapes: Shapes of its observations, by name, without the batch dimension.
    :param heads: Conversion of the policy's actions `[n_envs, ...]` to the environment's, by action head: clips them,
        as models of stable-baselines3 do.
    :param packs_actions: Whether actions with one head are dictionaries, too.
    :raises ConfigError: The policy needs the environment or its state.
    """

    def __init__(
        self,
        policy: Policy,
        actor_id: ActorID,
        shapes: Mapping[str, tuple[int, ...]],
        heads: Mapping[str, Callable[[np.ndarray], np.ndarray]],
        packs_actions: bool = False,
    ) -> None:
        if not getattr(policy, "is_recurrent", False) and (policy.needs_state() or policy.needs_env()):
            raise ConfigError(
                f"to_sb3: {type(policy).__name__} needs the environment or its state, but `predict` gets only "
                "observations."
            )
        self.policy = policy
        """The Maze policy."""
        self._actor_id = actor_id
        self._shapes = dict(shapes)
        self._heads = dict(heads)
        self._packs_actions = packs_actions or len(self._heads) > 1

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
    ) -> tuple[Any, Any]:
        """Compute actions.

        :param observation: An array, or a dictionary of arrays, of one environment or of several, `[n_envs, ...]`.
        :param state: The state returned with the previous actions: hidden states `[n_envs, size]` of a recurrent policy
            by key. For other policies it is returned unchanged.
        :param episode_start: Whether an episode begins, `[n_envs]`: resets the state of a recurrent policy.
        :param deterministic: Take deterministic actions instead of sampling.
        :return: Actions, `[n_envs, ...]` for several environments, and the state. Dictionary actions are a list, one
            for each environment.
        :raises EnvironmentContractError: An observation or a hidden state is missing, or has another shape.
        """
        entries = self._entries(observation)
        has_batch = {self._has_batch(name, entries[name]) for name in self._shapes}
        if len(has_batch) > 1:
            raise EnvironmentContractError("predict: some observations have a batch dimension, and others have none.")
        is_batch = has_batch == {True}
        batch = {name: value if is_batch else value[np.newaxis] for name, value in entries.items()}
        if getattr(self.policy, "is_recurrent", False):
            state = self._states(state, episode_start, len(next(iter(batch.values()))))
        chosen = self._actions(batch, deterministic, state)
        actions = {head: convert(chosen[head]) for head, convert in self._heads.items()}
        rows: Any = next(iter(actions.values()))
        if self._packs_actions:
            rows = split_rows(actions)
        return (rows if is_batch else rows[0]), state

    def seed(self, seed: int) -> None:
        """Seed the policy's generators."""
        self.policy.seed(seed)

    def _states(self, state: Any, episode_start: np.ndarray | None, n_rows: int) -> dict[str, np.ndarray]:
        """Return hidden states `[n_rows, size]` by key, which the recurrent policy overwrites."""
        policy: Any = self.policy
        sizes = policy.state_sizes(self._actor_id)
        states = {key: np.zeros((n_rows, size), np.float32) for key, size in sizes.items()}
        for key, array in states.items():
            if state is not None:
                found = np.shape(state[key]) if isinstance(state, Mapping) and key in state else None
                if found != array.shape:
                    raise EnvironmentContractError(
                        f"predict: expected the `state` of the previous call, `{key}` in the shape {array.shape}, "
                        f"found {found}."
                    )
                array[...] = state[key]
            if episode_start is not None:
                array[np.asarray(episode_start, np.bool_)] = 0.0
        return states

    def _actions(self, batch: dict[str, np.ndarray], deterministic: bool, state: Any) -> dict[str, np.ndarray]:
        compute_actions: Any = getattr(self.policy, "compute_actions", None)
        if compute_actions is not None:
            more = {"states": state} if getattr(self.policy, "is_recurrent", False) else {}
            chosen: dict[str, np.ndarray] = compute_actions(batch, self._actor_id, deterministic, **more)
            return chosen
        observations = split_rows(batch)
        rows = [self.policy.compute_action(row, None, None, self._actor_id, deterministic) for row in observations]
        return {head: np.stack([np.asarray(row[head]) for row in rows]) for head in self._heads}

    def _entries(self, observation: Any) -> dict[str, np.ndarray]:
        if not isinstance(observation, Mapping):
            if len(self._shapes) != 1:
                raise EnvironmentContractError(
                    f"predict: expected a dictionary with the observations {', '.join(self._shapes)}, found one array."
                )
            observation = {next(iter(self._shapes)): observation}
        if missing := [name for name in self._shapes if name not in observation]:
            raise EnvironmentContractError(
                f"predict: the observation {', '.join(missing)} is missing; there are {', '.join(observation)}."
            )
        return {name: np.asarray(observation[name]) for name in self._shapes}

    def _has_batch(self, name: str, value: np.ndarray) -> bool:
        shape = self._shapes[name]
        if value.shape == shape:
            return False
        if value.shape[1:] == shape and value.ndim:
            return True
        raise EnvironmentContractError(
            f"predict: expected the observation `{name}` in the shape {shape}, or {('n_envs', *shape)}, found "
            f"{value.shape}."
        )


def to_sb3(policy: Policy | str | Path, env: Any = None, trusted_packages: Sequence[str] = ()) -> SB3Predictor:
    """Give a Maze policy the method `predict(observation, state, episode_start, deterministic)`.

    Observations are those of the environment with the wrappers that the policy was trained with, as
    :func:`~maze.interop.to_gymnasium` exports it, single or dictionaries. Continuous actions are clipped to the action
    space.

    :param policy: A policy, the directory of a training run, or the file of a policy bundle.
    :param env: The environment of the caller: of Maze, exported or not, or of gymnasium. Actions are elements of its
        action space: dictionaries if it is one, counted from the `start` of a `Discrete` space of gymnasium. Required
        for a policy object, unless it was loaded from a run.
    :param trusted_packages: Further packages that the configuration of a run may name.
    :raises ConfigError: Spaces are unknown, there are several actors with different spaces, or the actions are not
        those of `env`.
    :raises CheckpointError: The run, or the bundle, cannot be read.
    """
    acted_in = getattr(env, "maze_env", env)
    packs_actions = acted_in is not None and isinstance(acted_in.action_space, spaces.Dict)
    foreign = None
    if isinstance(acted_in, gymnasium.Env):
        foreign = adapted(acted_in)
        known: Any = tuple(
            {0: conversion(foreign).space()} for conversion in (GymObservationConversion, GymActionConversion)
        )
    else:
        known = _spaces_of(acted_in) if acted_in is not None else None
    if isinstance(policy, str | Path):
        path = Path(policy)
        if path.is_file():
            bundled: Any = Factory(Policy).instantiate(  # type: ignore[type-abstract]  # a concrete one
                {"_target_": "maze.serve.policy.BundlePolicy", "bundle": str(path)}
            )
            step_key, step = next(iter(bundled.bundle.steps.items()))
            shapes = {name: tuple(shape) for name, shape in step.inputs.items()}
            described = bundled.bundle.card["steps"][0]["heads"]
            heads = _heads({head: _space_of(described[head]) for head in step.heads}, foreign)
            return SB3Predictor(bundled, ActorID(step_key, 0), shapes, heads, packs_actions)
        own_env, policy = RolloutRunner.init_stored_env_and_agent(path, trusted_packages)
        known = _spaces_of(own_env)
        own_env.close()
    elif known is None and (stored := getattr(policy, "spaces", None)) is not None:
        known = (stored.observation_spaces_dict, stored.action_spaces_dict)
    if known is None:
        raise ConfigError("to_sb3: name the environment that the policy acts in, to_sb3(policy, env).")
    observation_spaces, action_spaces = known
    if len(action_spaces) != 1:
        raise ConfigError(
            f"to_sb3: the policy acts in the sub-steps {list(action_spaces)}, and models of stable-baselines3 in one."
        )
    ((step_key, observation_space),) = observation_spaces.items()
    shapes = {name: tuple(space.shape or ()) for name, space in observation_space.spaces.items()}
    heads = _heads(action_spaces[step_key].spaces, foreign)
    return SB3Predictor(policy, ActorID(step_key, 0), shapes, heads, packs_actions)


def _heads(
    action_space: Mapping[str, spaces.Space[Any]], foreign: Any
) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Return the conversion of the policy's actions to the environment's, by head.

    :param action_space: Spaces of the policy's heads.
    :param foreign: The gymnasium environment of the caller; `None`: it is one of Maze.
    """
    bounds = ActionBounds(spaces.Dict(dict(action_space)))
    if foreign is None:
        return {head: partial(bounds.clip_rows, head) for head in action_space}
    leaves = action_leaves(foreign.action_space)[1]
    expected = {head: leaf.space.shape for head, leaf in leaves.items()}
    found = {head: space.shape for head, space in action_space.items()}
    if found != expected:
        raise ConfigError(
            f"to_sb3: the policy chooses actions of the shapes {found}, and {gym_env_name(foreign)} takes {expected}. "
            "Give the environment with the wrappers that the policy was trained with, exported by to_gymnasium."
        )

    def convert(head: str, values: np.ndarray) -> np.ndarray:
        return leaves[head].batch_to_gym(bounds.clip_rows(head, values))

    return {head: partial(convert, head) for head in action_space}


def _space_of(described: Mapping[str, Any]) -> spaces.Space[Any]:
    """Return the space of a bundle's head as a box, of which only the shape matters for discrete heads."""
    shape = tuple(described["shape"])
    low, high = (np.array(described.get(bound), np.float64) for bound in ("low", "high"))  # null, unbounded, is NaN
    low, high = np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)
    return spaces.Box(np.broadcast_to(low, shape), np.broadcast_to(high, shape), dtype=np.float64)


def _spaces_of(env: Any) -> tuple[Mapping[Any, Any], Mapping[Any, Any]]:
    """Return observation and action spaces by step key, inside of wrappers that remove dictionaries."""
    found = []
    for name in ("observation_spaces_dict", "action_spaces_dict"):
        inner = env
        while not all(isinstance(space, spaces.Dict) for space in getattr(inner, name).values()):
            inner = inner.env
        found.append(getattr(inner, name))
    return found[0], found[1]
