"""Structured environments for RLlib: each actor is one of its agents, and they take turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import ActorID
from maze.core.errors import EnvironmentContractError
from maze.rllib.environment import EnvConfig, FinishedEpisodes, SeedSource, SeenObservations, with_statistics
from maze.train.parallelization.vector_env.stats_codec import EncodedStats
from maze.train.trainers.common.observation_statistics import Moments

_SEPARATOR = ":"


class NetworkKeys(NamedTuple):
    """A network of a policy.

    :param network_key: Its key in the policy: a step key, or `(step_key, agent_id)`.
    :param step_key: The sub-step it acts in.
    """

    network_key: Any
    step_key: Any


def network_keys(policy: TorchPolicy) -> dict[str, NetworkKeys]:
    """The networks of a policy by the name of their module."""
    return {module_id(key): NetworkKeys(key, key[0] if isinstance(key, tuple) else key) for key in policy.networks}


def module_id(network_key: Any) -> str:
    """RLlib's name for the module of a network."""
    return "agent_" + "_".join(map(str, network_key)) if isinstance(network_key, tuple) else f"step_{network_key}"


def agent_name(actor: ActorID) -> str:
    """RLlib's name for an actor."""
    return f"{actor.step_key}{_SEPARATOR}{actor.agent_id}"


class ModuleOfAgent:
    """RLlib's `policy_mapping_fn`: agents of a sub-step share its network, unless they have networks of their own.

    :param separate: Step keys whose agents have networks of their own.
    """

    def __init__(self, separate: Sequence[Any]) -> None:
        self._separate = {str(key) for key in separate}

    def __call__(self, agent_id: str, *args: Any, **kwargs: Any) -> str:
        step_key, _, agent = str(agent_id).rpartition(_SEPARATOR)
        return f"agent_{step_key}_{agent}" if step_key in self._separate else f"step_{step_key}"


class MazeMultiAgentEnv(MultiAgentEnv):
    """A structured Maze environment for RLlib, which makes one in each of its workers.

    An agent earns what the environment gives from its action until its next observation: its own actor reward where
    the environment has such, and otherwise the rewards of all sub-steps in that time.

    Where an episode is cut off, RLlib wants a last observation of every agent to continue its value from. Only the next
    actor has one; the others get the one they acted on last, which is an environment step old.

    :param context: RLlib's `EnvContext`: the :class:`~maze.rllib.environment.EnvConfig` under `maze`.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        super().__init__()
        config: EnvConfig = context["maze"]
        env = with_statistics(config.factory())
        self.maze_env = env
        self._finished = FinishedEpisodes(env)
        self._seen = SeenObservations(config.normalized, env)
        self._seeds = SeedSource(config.seed, getattr(context, "worker_index", 0) or 0)
        names = {
            agent_name(ActorID(step_key, agent)): step_key
            for step_key, count in env.agent_counts_dict.items()
            for agent in range(count)
        }
        _require_fixed_agents(env)
        self.possible_agents = list(names)
        self.agents = list(names)
        self.observation_spaces = {name: env.observation_spaces_dict[key] for name, key in names.items()}
        self.action_spaces = {name: env.action_spaces_dict[key] for name, key in names.items()}
        self._acted: dict[str, Any] = {}  # by agent, the observation it acted on last
        self._order: list[str] = []  # who acted in each sub-step of the episode
        self._waiting: Any = None
        self._env_time = 0
        self._discrete = {
            name: [key for key, space in part.spaces.items() if isinstance(space, spaces.Discrete)]
            for name, part in self.observation_spaces.items()
        }

    @override(MultiAgentEnv)
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.maze_env.seed(self._seeds.seed_for(seed))
        observation = self.maze_env.reset()
        self._acted.clear()
        self._order.clear()
        self._env_time = self.maze_env.get_env_time()
        return self._of_next_actor(observation), {}

    @override(MultiAgentEnv)
    def step(self, action_dict: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        acting = agent_name(self.maze_env.actor_id())
        self._acted[acting] = self._waiting
        self._order.append(acting)
        self._seen.add(self._waiting)
        observation, reward, done, info = self.maze_env.step(action_dict[acting])
        truncated = is_truncated(done, info)
        observations = self._of_next_actor(observation)
        if truncated:
            observations = {**self._acted, **observations}
        elif done:
            observations = {name: value for name, value in observations.items() if name in self._acted}
        return (
            observations,
            self._rewards(float(reward)),
            {"__all__": bool(done) and not truncated},
            {"__all__": truncated},
            {},
        )

    @override(MultiAgentEnv)
    def close(self) -> None:
        self.maze_env.close()

    def take_statistics(self) -> list[EncodedStats]:
        """Statistics of the episodes finished since the last call."""
        return self._finished.take()

    def take_seen(self) -> Moments | None:
        """Statistics of what was acted on since the last call."""
        return self._seen.take()

    def _rewards(self, reward: float) -> dict[str, float]:
        """Those who have acted earn; rewards of one agent add up until its next observation."""
        env_time = self.maze_env.get_env_time()
        is_step_complete, self._env_time = env_time != self._env_time, env_time
        # within an environment step they are still those of the step before
        of_actors = self.maze_env.get_actor_rewards() if is_step_complete else None
        if of_actors is None:
            return dict.fromkeys(self._acted, reward)
        rewards = dict.fromkeys(self._acted, 0.0)
        for name, earned in zip(reversed(self._order), reversed(np.ravel(of_actors)), strict=False):
            rewards[name] += float(earned)
        return rewards

    def _of_next_actor(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        name = agent_name(self.maze_env.actor_id())
        discrete = self._discrete.get(name)
        if discrete is None:
            raise EnvironmentContractError(
                f"env: {self.maze_env!r} waits for actor {name}, which is none of {self.possible_agents}."
            )
        self._waiting = {**observation, **{key: np.int64(observation[key]) for key in discrete}}
        return {name: self._waiting}


def _require_fixed_agents(env: Any) -> None:
    from maze.core.errors import ConfigError

    counts = env.agent_counts_dict
    if any(count < 1 for count in counts.values()):
        raise ConfigError(
            f"env: {env!r} has agents that come and go (agent counts {dict(counts)}), which cannot be trained with "
            "RLlib here. Train it with Maze: maze-run -cn conf_train algorithm=ppo."
        )
