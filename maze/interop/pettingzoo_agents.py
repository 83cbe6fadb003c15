"""Agents of PettingZoo: adapters of their spaces, and shared policies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import ConfigError, did_you_mean
from maze.core.wrappers.gym_adapters import ACTION_MASK, adapted

_NUMBERED = re.compile(r"(.*[^\d_-])[_-]?\d+")


class AgentAdapter(gymnasium.Env[Any, Any]):
    """Adapter of the observations and actions of the agents of one policy to spaces that networks support.

    It is the environment inside of gymnasium's wrappers, if these are needed.

    :param observation_space: Of the agents.
    :param action_space: Of the agents.
    :param drop: Observations to leave out.
    :param encode: Number of characters or items that are encoded of a text or sequence.
    :param has_mask: Whether their infos hold a mask of their actions.
    """

    def __init__(
        self,
        observation_space: Any,
        action_space: Any,
        drop: Sequence[str],
        encode: Mapping[str, int] | None,
        has_mask: bool,
    ) -> None:
        self._adds_mask = self._is_dict = False
        self._all_valid = np.ones(0, np.int8)
        if has_mask and isinstance(action_space, spaces.Discrete):
            entries = observation_space.spaces if isinstance(observation_space, spaces.Dict) else None
            if ACTION_MASK not in (entries or {}):
                self._adds_mask, self._is_dict = True, entries is not None
                self._all_valid = np.ones(int(action_space.n), np.int8)
                mask = spaces.Box(0, 1, self._all_valid.shape, np.int8)
                observation_space = spaces.Dict({**(entries or {"observation": observation_space}), ACTION_MASK: mask})
        self.observation_space, self.action_space = observation_space, action_space
        self._seen: Any = None
        self._taken: Any = None
        wrapped = adapted(self, drop, encode)
        self._wrapped = None if wrapped is self else wrapped
        if self._wrapped is not None:
            self.observation_space, self.action_space = wrapped.observation_space, wrapped.action_space

    def observed(self, observation: Any, info: Mapping[str, Any]) -> Any:
        """Adapt an observation of PettingZoo."""
        if self._adds_mask:
            shown = observation if self._is_dict else {"observation": observation}
            mask = info.get(ACTION_MASK)
            observation = {**shown, ACTION_MASK: self._all_valid if mask is None else mask}
        if self._wrapped is None:
            return observation
        self._seen = observation
        return self._wrapped.reset()[0]

    def taken(self, action: Any) -> Any:
        """Adapt an action to PettingZoo's environment."""
        if self._wrapped is None:
            return action
        self._wrapped.step(action)
        return self._taken

    @override(gymnasium.Env)
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._seen, {}

    @override(gymnasium.Env)
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._taken = action
        return self._seen, 0.0, False, False, {}


def with_unique_names(conversions: Mapping[StepKeyType, ActionConversionInterface]) -> dict[StepKeyType, Any]:
    """Rename actions of the same name with different spaces: a model has one distribution per name."""
    found: dict[str, list[spaces.Space[Any]]] = {}
    for conversion in conversions.values():
        for head, space in conversion.space().spaces.items():
            found[head] = [*(known for known in found.get(head, []) if known != space), space]
    twice = {head for head, different in found.items() if len(different) > 1}
    return {
        key: RenamedActions(conversion, {head: f"{key}_{head}" for head in twice & set(conversion.space().spaces)})
        if twice & set(conversion.space().spaces)
        else conversion
        for key, conversion in conversions.items()
    }


class RenamedActions(ActionConversionInterface):
    """Conversion with renamed actions.

    :param conversion: The conversion.
    :param names: New names by old names; others stay.
    """

    def __init__(self, conversion: ActionConversionInterface, names: Mapping[str, str]) -> None:
        self._conversion = conversion
        self._names = {head: names.get(head, head) for head in conversion.space().spaces}
        self._space = spaces.Dict({self._names[head]: space for head, space in conversion.space().spaces.items()})

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> MazeActionType:
        return self._conversion.space_to_maze({head: action[name] for head, name in self._names.items()}, maze_state)

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: MazeActionType) -> dict[str, np.ndarray]:
        action = self._conversion.maze_to_space(maze_action)
        return {name: action[head] for head, name in self._names.items()}

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space


def has_masks(env: Any, agents: Sequence[str]) -> bool:
    """Return whether the infos of an environment hold masks; it is reset.

    :param env: The environment, AEC.
    :param agents: Names of its agents.
    """
    env.reset()
    return any(
        np.shape(env.infos.get(agent, {}).get(ACTION_MASK)) == (int(getattr(env.action_space(agent), "n", -1)),)
        for agent in agents
    )


def actors_of(env: Any, policies: str | Mapping[str, str]) -> dict[str, ActorID]:
    """Return the actor of each agent.

    :param env: The environment, AEC.
    :param policies: Shared policies, see :class:`~maze.interop.pettingzoo_env.PettingZooEnv`.
    :raises ConfigError: The policies do not fit, or the environment does not name its agents.
    """
    agents = list(getattr(env, "possible_agents", None) or ())
    if not agents:
        raise ConfigError(f"env: {env} has no `possible_agents`, which networks are built for.")
    keys = _step_keys(env, agents, policies)
    counts: dict[str, int] = {}
    actors: dict[str, ActorID] = {}
    for agent in agents:
        key = keys[agent]
        actors[agent] = ActorID(key, counts.get(key, 0))
        counts[key] = counts.get(key, 0) + 1
    return actors


def _step_keys(env: Any, agents: Sequence[str], policies: str | Mapping[str, str]) -> Mapping[str, str]:
    if isinstance(policies, Mapping):
        for agent in (*agents, *policies):
            if agent not in policies or agent not in agents:
                raise ConfigError(
                    f"env.policies: expected a policy for each of the agents {', '.join(agents)}, found "
                    f"{dict(policies)}.{did_you_mean(agent, agents)}"
                )
        return policies
    if policies == "shared":
        return dict.fromkeys(agents, "agent")
    if policies == "separate":
        return {agent: agent for agent in agents}
    if policies != "by_name":
        raise ConfigError(
            f"env.policies: expected by_name, shared, separate or the policy of each agent, found {policies!r}."
        )
    names = {agent: match[1] if (match := _NUMBERED.fullmatch(agent)) else agent for agent in agents}
    spaces_of: dict[str, list[Any]] = {}
    for agent, name in names.items():
        found = (env.observation_space(agent), env.action_space(agent))
        if found not in spaces_of.setdefault(name, []):
            spaces_of[name].append(found)
    return {agent: name if len(spaces_of[name]) == 1 else agent for agent, name in names.items()}
