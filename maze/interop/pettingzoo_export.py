"""Export of Maze environments, in particular with several actors, as PettingZoo environments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.utils.conversions import turn_based_aec_to_parallel_wrapper

from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID, StepKeyType
from maze.core.errors import ConfigError
from maze.core.wrappers.gym_adapters import ACTION_MASK
from maze.interop.gymnasium_export import RENDER_MODES, dict_spaces, discrete_keys, drawn, mask_heads, with_numbers


class MazeAECEnv(AECEnv):
    """A Maze environment with PettingZoo's AEC interface: each actor is an agent.

    Agents are named by sub-step and number, `vehicle_0`. An agent gets its per-actor rewards, if the environment
    reports them, when an environment step is complete; otherwise all agents get the rewards of all sub-steps.
    Observations and actions are those of the Maze environment, actions with one entry without their dictionary. Masks
    of actions are also in `infos`, in the format of PettingZoo's `action_space(agent).sample(mask)`.

    Agents observe zeros before their first turn. If the number of agents varies, they are added when they first act,
    and there are no `possible_agents`.

    :param env: The Maze environment with all its wrappers.
    :param render_mode: `human` or `rgb_array`; `None`: no rendering.
    :raises ConfigError: It is not a Maze environment, or there is no such render mode.
    """

    metadata: dict[str, Any]
    agents: list[str]
    rewards: dict[str, float]
    _cumulative_rewards: dict[str, float]
    terminations: dict[str, bool]
    truncations: dict[str, bool]
    infos: dict[str, dict[str, Any]]

    def __init__(self, env: MazeEnv[Any], render_mode: str | None = None) -> None:
        super().__init__()
        if render_mode not in (None, *RENDER_MODES):
            raise ConfigError(f"to_aec: `render_mode` must be one of {RENDER_MODES}, found {render_mode!r}.")
        self.maze_env = env
        """The Maze environment."""
        self.render_mode = render_mode
        name = type(env.core_env).__name__
        self.metadata = {"name": name, "render_modes": RENDER_MODES, "render_fps": 10, "is_parallelizable": False}
        self._actor_of: dict[str, ActorID] = {}
        self._step_keys: dict[str, StepKeyType] = {_prefix(key): key for key in env.action_spaces_dict}
        counts = env.agent_counts_dict
        self._is_fixed = all(count > 0 for count in counts.values())
        names = [self._name(ActorID(key, number)) for key, count in counts.items() for number in range(max(count, 0))]
        if self._is_fixed:
            self.possible_agents = names
        self.agents = []
        self._heads: dict[StepKeyType, str] = {}
        self._action_spaces: dict[StepKeyType, spaces.Space[Any]] = {}
        # wrappers may have replaced dictionary spaces
        action_spaces: Mapping[StepKeyType, spaces.Space[Any]] = env.action_spaces_dict
        observation_spaces: Mapping[StepKeyType, spaces.Space[Any]] = env.observation_spaces_dict
        for key, space in action_spaces.items():
            self._action_spaces[key] = space
            if isinstance(space, spaces.Dict) and len(space.spaces) == 1:
                ((self._heads[key], self._action_spaces[key]),) = space.spaces.items()
        self._masks: dict[StepKeyType, dict[str, str]] = {}
        heads = dict_spaces(env, "action_spaces_dict")
        for key, space in observation_spaces.items():
            masks = mask_heads(space, heads[key]) if isinstance(space, spaces.Dict) else {}
            self._masks[key] = {head: mask for mask, head in masks.items()}
        self._discrete = {key: discrete_keys(space) for key, space in env.observation_spaces_dict.items()}
        self._observations: dict[str, Any] = {}
        self._order: list[str] = []
        self._pending = 0.0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """Return the observation space of an agent.

        :param agent: Name of the agent, such as `vehicle_0`.
        :raises KeyError: There is no such sub-step.
        """
        space: spaces.Space[Any] = self.maze_env.observation_spaces_dict[self._step_key(agent)]
        return space

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """Return the action space of an agent: of an action with one entry the space of that entry.

        :param agent: Name of the agent, such as `vehicle_0`.
        :raises KeyError: There is no such sub-step.
        """
        return self._action_spaces[self._step_key(agent)]

    def observe(self, agent: str) -> Any:
        """Return the last observation of an agent; zeros before its first turn.

        :param agent: Name of the agent.
        :raises KeyError: The agent has not entered the episode.
        """
        return self._observations[agent]

    @override(AECEnv)
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        if seed is not None:
            self.maze_env.seed(seed)
        observation = self.maze_env.reset()
        self._observations, self._order, self._pending = {}, [], 0.0
        self.agents = []
        self.rewards, self._cumulative_rewards, self.terminations, self.truncations, self.infos = {}, {}, {}, {}, {}
        for agent in self.possible_agents if self._is_fixed else ():
            self._enter(agent)
        self._skip_agent_selection = None
        self._turn_to_next(observation)

    @override(AECEnv)
    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent] or self.truncations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._order.append(agent)
        env_time = self.maze_env.get_env_time()
        head = self._heads.get(self._step_key(agent))
        observation, reward, done, info = self.maze_env.step(action if head is None else {head: action})
        self._clear_rewards()
        self._pending += float(reward)
        if done or self.maze_env.get_env_time() != env_time:  # the environment step is complete
            if (own := self.maze_env.get_actor_rewards()) is None:
                self.rewards = dict.fromkeys(self.agents, self._pending)
            else:
                for name, earned in zip(reversed(self._order), reversed(np.ravel(own)), strict=False):
                    if name in self.rewards:
                        self.rewards[name] += float(earned)
            self._pending = 0.0
        left = [self._order[-1 - ago] for ago in (info or {}).get(ACTORS_DONE_KEY, ()) if ago < len(self._order)]
        if self.maze_env.is_actor_done():
            left.append(agent)
        self.terminations.update({name: True for name in left if name in self.terminations})
        if done:
            ends = self.truncations if is_truncated(done, info) else self.terminations
            ends.update({name: True for name in self.agents if not self.terminations[name]})
        self._accumulate_rewards()
        self._turn_to_next(observation)
        if self.render_mode == "human":
            self.render()

    def render(self) -> Any:
        """Draw the current state: pixels for "rgb_array", a window for "human"."""
        return drawn(self.maze_env, self.render_mode)

    def close(self) -> None:
        """Close the Maze environment."""
        self.maze_env.close()

    def _turn_to_next(self, observation: Any) -> None:
        """Set the observation of the next actor; agents that are done take their last steps first."""
        actor = self.maze_env.actor_id()
        agent = self._name(actor)
        over = [name for name in self.agents if self.terminations[name] or self.truncations[name]]
        if agent not in self.agents and (not over or over != self.agents):
            self._enter(agent)
        if agent in self.agents:
            numbers = self._discrete[actor.step_key]
            self._observations[agent] = observation = with_numbers(observation, numbers)
            if masks := self._masks[actor.step_key]:
                valid = {head: (np.asarray(observation[mask]) > 0).astype(np.int8) for head, mask in masks.items()}
                space = self._action_spaces[actor.step_key]
                of_heads = {head: valid.get(head) for head in space.spaces} if isinstance(space, spaces.Dict) else None
                self.infos[agent] = {ACTION_MASK: of_heads or next(iter(valid.values()))}
            self.agent_selection = agent
        if over:
            if agent not in self.agents:
                self.agent_selection = self.agents[0]
            self._deads_step_first()

    def _enter(self, agent: str) -> None:
        self.agents.append(agent)
        self._observations[agent] = _zeros(self.observation_space(agent))
        self.rewards[agent] = self._cumulative_rewards[agent] = 0.0
        self.terminations[agent] = self.truncations[agent] = False
        self.infos[agent] = {}

    def _name(self, actor: ActorID) -> str:
        return f"{_prefix(actor.step_key)}_{actor.agent_id}"

    def _step_key(self, agent: str) -> StepKeyType:
        return self._step_keys[agent.rpartition("_")[0]]


class MazeParallelEnv(turn_based_aec_to_parallel_wrapper):
    """A Maze environment with PettingZoo's parallel interface.

    Actors of Maze act in turn and may observe the actions before theirs. Therefore one agent acts in each parallel
    step, the one whose `infos[agent]["acts"]` is true; the actions of the others are ignored.

    :param env: The Maze environment with all its wrappers and a fixed number of agents.
    :param render_mode: See :class:`MazeAECEnv`.
    :raises ConfigError: The number of agents varies.
    """

    def __init__(self, env: MazeEnv[Any], render_mode: str | None = None) -> None:
        aec_env = MazeAECEnv(env, render_mode)
        if not hasattr(aec_env, "possible_agents"):
            raise ConfigError(
                f"to_parallel: {env!r} has a variable number of agents (agent counts {env.agent_counts_dict}). Export "
                "it by to_aec."
            )
        super().__init__(aec_env)
        self.agents: list[str] = []

    @override(turn_based_aec_to_parallel_wrapper)
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        observations, infos = super().reset(seed, options)
        return observations, self._telling_turns(infos)

    @override(turn_based_aec_to_parallel_wrapper)
    def step(self, actions: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        if not self.agents:
            return {}, {}, {}, {}, {}
        *results, infos = super().step(actions)
        self.agents = list(self.agents)
        return (*results, self._telling_turns(infos))

    def _telling_turns(self, infos: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        acting = self.aec_env.agent_selection if self.agents else None
        return {agent: {**info, "acts": agent == acting} for agent, info in infos.items()}


def to_aec(env: MazeEnv[Any], render_mode: str | None = None) -> MazeAECEnv:
    """Export a Maze environment with any actors as an AEC environment of PettingZoo.

    :param env: The environment with all its wrappers.
    :param render_mode: How `render` draws.
    """
    return MazeAECEnv(env, render_mode)


def to_parallel(env: MazeEnv[Any], render_mode: str | None = None) -> MazeParallelEnv:
    """Export a Maze environment with a fixed number of actors as a parallel environment of PettingZoo.

    :param env: The environment with all its wrappers.
    :param render_mode: How `render` draws.
    """
    return MazeParallelEnv(env, render_mode)


def _prefix(step_key: StepKeyType) -> str:
    return f"step_{step_key}" if isinstance(step_key, int) else step_key


def _zeros(space: spaces.Space[Any]) -> Any:
    """Return the element of a space that is closest to zero."""
    if isinstance(space, spaces.Dict):
        return {key: _zeros(part) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Box):
        return np.clip(np.zeros(space.shape, space.dtype), space.low, space.high)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return space.start if isinstance(space, spaces.Discrete) else np.array(space.start, space.dtype)
    return np.zeros(space.shape or (), space.dtype)
