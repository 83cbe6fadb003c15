"""Stacking of the observations of several time steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigValueError
from maze.core.utils.array_conversions import Stack
from maze.core.utils.config_utils import whole_number
from maze.core.wrappers import wrapper

History = dict[tuple[Any, str], np.ndarray]
"""The latest observations `[stack_steps, ...]`, oldest first, by actor and name of the stacked observation."""


class ObservationStackWrapper(wrapper.SubstepObservationWrapper):
    """Stack the latest observations of an actor along a new first axis, the oldest first.

    At the beginning of an episode, the first observation is repeated. Every actor has a history of its own.

    :param env: The environment to wrap.
    :param stack_config: One mapping for each observation to stack: `observation` (name), `stack_steps` (how many),
        `tag` (the stack is called `<name>-<tag>`; by default it takes the observation's name), `keep_original`
        (whether the observation stays beside it, default false; needs a tag), `delta` (default false; all but the
        latest observation are replaced by the difference to their successor, integers become float32).
    :raises ConfigError: The configuration names an unknown observation, or one that cannot be stacked.
    """

    CLONED = ("_history", "_conversion_history")  # arrays in a history are replaced, never written to

    def __init__(self, env: MazeEnv[Any], stack_config: list[dict[str, Any]]) -> None:
        super().__init__(env)
        step_spaces = {key: dict(space.spaces) for key, space in env.observation_spaces_dict.items()}
        self.stacks: dict[StepKeyType, list[Stack]] = {key: [] for key in step_spaces}
        """The stacked entries of each sub-step."""
        for index, entry in enumerate(stack_config):
            self._add(entry, f"stack_config[{index}]", step_spaces)
        self.observation_spaces_dict = {key: spaces.Dict(entries) for key, entries in step_spaces.items()}
        self._is_one_actor = len(step_spaces) == 1 and list(env.agent_counts_dict.values()) == [1]
        self._history: History = {}
        self._conversion_history: History = {}

    @override(wrapper.SubstepObservationWrapper)
    def substep_observation(self, observation: wrapper.Observation, step_key: StepKeyType) -> wrapper.Observation:
        actor: Any = step_key if self._is_one_actor else self.env.actor_id()
        return self._stacked(observation, self.stacks[step_key], actor, self._history)

    @override(wrapper.SubstepObservationWrapper)
    def reset(self, **kwargs: Any) -> Any:
        observation = self._env_reset(**kwargs)
        self._history.clear()
        return self.observation(observation)

    @override(wrapper.SubstepObservationWrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> wrapper.ObservationsAndActions:
        """See :class:`Wrapper`; states must be given in order. Their history is not that of the running episode."""
        observations, actions = self.env.get_observation_and_action_dicts(
            maze_state, maze_action, first_step_in_episode
        )
        if observations is None:
            return observations, actions
        if first_step_in_episode:
            self._conversion_history.clear()
        history = self._conversion_history
        actor = self.env.converted_actor
        agent_id = 0 if actor is None else actor.agent_id
        stacked = {
            key: self._stacked(entry, self.stacks[key], ActorID(key, agent_id), history)
            for key, entry in observations.items()
        }
        return stacked, actions

    def _add(self, entry: Any, where: str, step_spaces: dict[StepKeyType, dict[str, spaces.Space[Any]]]) -> None:
        """Apply an entry of the configuration to all sub-steps with its observation, and update their spaces."""
        wrapper.checked_entry(entry, where, ("observation", "stack_steps"), ("keep_original", "tag", "delta"))
        name, tag, n_steps = entry["observation"], entry.get("tag"), entry["stack_steps"]
        if wrapper.is_mask(name):
            raise ConfigValueError(f"{where}: `{name}` is an action mask; masks are never stacked.")
        whole_number(f"{where}.stack_steps", n_steps, at_least=1)
        if entry.get("keep_original") and not tag:
            raise ConfigValueError(f"{where}: `keep_original: true` needs a `tag` to tell the stack from the original.")
        target = f"{name}-{tag}" if tag else name
        keeps_original, is_delta = bool(entry.get("keep_original", False)), bool(entry.get("delta", False))
        for step_key, space in wrapper.known_spaces(step_spaces, name, where, "observation").items():
            entries = step_spaces[step_key]
            if not isinstance(space, spaces.Box):
                raise ConfigValueError(f"{where}: `{name}` must have a Box space to be stacked, found {space}.")
            if target != name and target in entries:
                raise ConfigValueError(f"{where}: sub-step {step_key!r} already has an observation `{target}`.")
            if not keeps_original:
                del entries[name]
            entries[target] = _stacked_space(space, n_steps, is_delta)
            dtype = np.dtype(entries[target].dtype)
            self.stacks[step_key].append(Stack(name, target, keeps_original, is_delta, n_steps, dtype))

    @staticmethod
    def _stacked(
        observation: wrapper.Observation, stacks: list[Stack], actor: Any, history: History
    ) -> wrapper.Observation:
        result = dict(observation)
        for stack in stacks:
            stack.add_to(result, history, actor)
        return result


def _stacked_space(space: spaces.Box, n_steps: int, is_delta: bool) -> spaces.Box:
    if not is_delta:
        return spaces.Box(np.stack([space.low] * n_steps), np.stack([space.high] * n_steps), dtype=space.dtype.type)
    is_float = np.issubdtype(space.dtype, np.floating)
    dtype = space.dtype.type if is_float else np.float32
    low, high = space.low.astype(dtype), space.high.astype(dtype)
    with np.errstate(over="ignore"):  # differences of the largest numbers are infinite
        lows, highs = [low - high] * (n_steps - 1), [high - low] * (n_steps - 1)
    return spaces.Box(np.stack([*lows, low]), np.stack([*highs, high]), dtype=dtype)
