"""Maze environments with the interfaces of RLlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import ACTORS_DONE_KEY, ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.interop.gymnasium_export import MazeGymnasiumEnv, discrete_keys, with_numbers
from maze.train.parallelization.vector_env.vector_env_utils import PortableStats, disable_epoch_level_stats
from maze.train.trainers.common.observation_statistics import Moments, ObservedRows


@dataclass(frozen=True)
class EnvConfig:
    """Configuration of an environment in a worker.

    :param factory: Makes the Maze environment with all its wrappers.
    :param seed: Seed of the run's environments.
    :param is_single_action: Use the space of the only action head instead of a dictionary.
    :param is_single_observation: Use the space of the only observation instead of a dictionary.
    :param normalized: Observations with running normalization.
    """

    factory: Callable[[], Any]
    seed: int
    is_single_action: bool = False
    is_single_observation: bool = False
    normalized: tuple[str, ...] = ()


class MonitoredEnv(LogStatsConsumer):
    """An environment in a worker of RLlib: its seeds, and the statistics of its episodes and observations.

    RLlib seeds the environments of worker `w` with `seed + w`, `seed + w + 1` and so on, so that most of them have the
    seed of one in the next worker. :meth:`seed` derives different seeds.

    :param context: RLlib's `EnvContext`: the :class:`EnvConfig` under `maze`, and the worker's index.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        config: EnvConfig = context["maze"]
        env = config.factory()
        self.env: Any = env if isinstance(env, LogStatsWrapper) else LogStatsWrapper.wrap(env)
        self._entropy = (config.seed, getattr(context, "worker_index", 0) or 0)
        self._episodes: list[LogStats] = []
        disable_epoch_level_stats(self.env)
        self.env.get_stats(LogStatsLevel.EPISODE).register_consumer(self)
        self._observed = ObservedRows(config.normalized, self.env.observation_spaces_dict, 1)

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        self._episodes.append(PortableStats(stat))

    def seed(self, given: int) -> None:
        """Seed the environment with a seed that is unique for a seed of RLlib and this worker."""
        self.env.seed(unique_seed(*self._entropy, given))

    def observed(self, observation: Mapping[str, Any]) -> None:
        """Add an observation that the next actor acts on to the statistics."""
        if self._observed:
            rows = {name: np.asarray(value)[None] for name, value in observation.items()}
            self._observed.add(self.env.actor_id(), rows, slice(0, 1))

    def take(self) -> tuple[list[LogStats], Moments | None]:
        """Return the statistics of the episodes and of the normalized observations since the last call."""
        episodes, self._episodes = self._episodes, []
        observed = self._observed.of(0)
        self._observed.begin(0)
        return episodes, observed


def unique_seed(seed: int, worker_index: int, given: int) -> int:
    """Derive the seed of an environment.

    :param seed: Seed of the run's environments.
    :param worker_index: Index of the worker.
    :param given: Seed that RLlib sets in this worker.
    """
    return int(np.random.SeedSequence((seed, worker_index, given)).generate_state(1, np.uint32)[0] >> 1)


class MazeRLlibEnv(MazeGymnasiumEnv):
    """A flat Maze environment for RLlib, which makes one in each of its workers.

    :param context: RLlib's `EnvContext`: the :class:`EnvConfig` under `maze`, and the worker's index.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        config: EnvConfig = context["maze"]
        self.monitored = MonitoredEnv(context)
        super().__init__(self.monitored.env)
        self._latest: Mapping[str, Any] = {}
        self._head, self.action_space = _only_entry(self.action_space, "action", config.is_single_action)
        self._observed, self.observation_space = _only_entry(
            self.observation_space, "observation", config.is_single_observation
        )

    @override(MazeGymnasiumEnv)
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self.monitored.seed(seed)
        return super().reset()

    @override(MazeGymnasiumEnv)
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.monitored.observed(self._latest)
        taken = action if self._head is None else {self._head: action}
        observation, reward, terminated, truncated, _ = super().step(taken)
        return observation, reward, terminated, truncated, {}  # RLlib stores the infos of all steps

    @override(MazeGymnasiumEnv)
    def _observation(self, observation: Any) -> Any:
        self._latest = observation
        converted = super()._observation(observation)
        # may be called before the end of the constructor
        return converted if getattr(self, "_observed", None) is None else converted[self._observed]


def _only_entry(space: spaces.Space[Any], what: str, is_wanted: bool) -> tuple[str | None, spaces.Space[Any]]:
    """Return the key and the space of the only entry of a dictionary space, if it is wanted."""
    if not is_wanted or not isinstance(space, spaces.Dict):
        return None, space
    if len(space.spaces) > 1:
        raise ConfigError(
            f"env: expected a single {what}, found {list(space.spaces)}. Choose an algorithm with dictionary "
            "actions (ppo, appo, impala)."
        )
    ((key, entry),) = space.spaces.items()
    return key, entry


def take_of_runner(env_runner: Any) -> list[tuple[list[LogStats], Moments | None]]:
    """Take the statistics of all environments of an env runner of RLlib; runs in its process."""
    envs = () if env_runner.env is None else getattr(env_runner.env.unwrapped, "envs", ())
    return [env.unwrapped.monitored.take() for env in envs]


_SEPARATOR = ":"


def step_key_of(network_key: Any) -> Any:
    """Return the sub-step of a network of a policy, whose key is a step key or `(step_key, agent_id)`."""
    return network_key[0] if isinstance(network_key, tuple) else network_key


def module_id(network_key: Any) -> str:
    """Return RLlib's name for the module of a network."""
    return "agent_" + "_".join(map(str, network_key)) if isinstance(network_key, tuple) else f"step_{network_key}"


def agent_name(actor: ActorID) -> str:
    """Return RLlib's name for an actor."""
    return f"{actor.step_key}{_SEPARATOR}{actor.agent_id}"


def module_of_agent(separate: Sequence[Any], agent_id: str, *args: Any, **kwargs: Any) -> str:
    """Map an agent to its module: agents of a sub-step share its network, unless they have separate networks.

    :param separate: Step keys whose agents have separate networks.
    :param agent_id: Name of the agent; the further arguments are those of RLlib.
    """
    step_key, _, agent = str(agent_id).rpartition(_SEPARATOR)
    return f"agent_{step_key}_{agent}" if step_key in map(str, separate) else f"step_{step_key}"


class MazeMultiAgentEnv(MultiAgentEnv):
    """A structured Maze environment for RLlib, which makes one in each of its workers.

    The reward of an agent covers the time from its action to its next observation: its per-actor rewards if the
    environment reports them, otherwise the rewards of all sub-steps in that time.

    RLlib bootstraps truncated episodes from a last observation of every agent. Only the next actor has one; the others
    get the observation of their last action, which is one environment step old. Agents that have left are terminated
    then, as nothing follows for them; until then they may get rewards, which RLlib does not allow terminated agents.

    :param context: RLlib's `EnvContext`: the :class:`EnvConfig` under `maze`, and the worker's index.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        super().__init__()
        self.monitored = MonitoredEnv(context)
        self.maze_env = env = self.monitored.env
        counts = dict(env.agent_counts_dict)
        if any(count < 1 for count in counts.values()):
            raise ConfigError(
                f"env: {env!r} has a variable number of agents (agent counts {counts}), which RLlib does not support "
                "here. Train it with Maze: maze-run -cn conf_train algorithm=ppo."
            )
        names = {agent_name(ActorID(key, agent)): key for key, count in counts.items() for agent in range(count)}
        self.possible_agents = list(names)
        self.agents = list(names)
        self.observation_spaces = {name: env.observation_spaces_dict[key] for name, key in names.items()}
        self.action_spaces = {name: env.action_spaces_dict[key] for name, key in names.items()}
        self._acted: dict[str, Any] = {}  # observation of the last action, by agent
        self._order: list[str] = []  # agent of each sub-step of the episode
        self._left: set[str] = set()  # agents that are done, while others act
        self._waiting: Any = None
        self._env_time = 0
        self._discrete = {name: discrete_keys(space) for name, space in self.observation_spaces.items()}

    @override(MultiAgentEnv)
    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        if seed is not None:
            self.monitored.seed(seed)
        observation = self.maze_env.reset()
        self._acted.clear()
        self._order.clear()
        self._left.clear()
        self._env_time = self.maze_env.get_env_time()
        return self._of_next_actor(observation), {}

    @override(MultiAgentEnv)
    def step(self, action_dict: Mapping[str, Any]) -> tuple[Any, Any, Any, Any, Any]:
        acting = agent_name(self.maze_env.actor_id())
        self._acted[acting] = self._waiting
        self._order.append(acting)
        self.monitored.observed(self._waiting)
        observation, reward, done, info = self.maze_env.step(action_dict[acting])
        truncated = is_truncated(done, info)
        self._left.update(self._order[-1 - ago] for ago in info.get(ACTORS_DONE_KEY, ()) if ago < len(self._order))
        if self.maze_env.is_actor_done():
            self._left.add(acting)
        observations = self._of_next_actor(observation)
        terminated = {"__all__": bool(done) and not truncated}
        if truncated:
            observations = {**self._acted, **observations}
            terminated |= dict.fromkeys(self._left, True)
        elif done:
            observations = {name: value for name, value in observations.items() if name in self._acted}
        return (observations, self._rewards(float(reward)), terminated, {"__all__": truncated}, {})

    @override(MultiAgentEnv)
    def close(self) -> None:
        self.maze_env.close()

    def _rewards(self, reward: float) -> dict[str, float]:
        """Return the rewards of agents that have acted; RLlib adds them up until the agent's next observation."""
        env_time = self.maze_env.get_env_time()
        is_step_complete, self._env_time = env_time != self._env_time, env_time
        if (of_actors := self.maze_env.get_actor_rewards()) is None:
            return dict.fromkeys(self._acted, reward)
        rewards = dict.fromkeys(self._acted, 0.0)
        if is_step_complete:  # within an environment step they are those of the previous step
            for name, earned in zip(reversed(self._order), reversed(np.ravel(of_actors)), strict=False):
                rewards[name] += float(earned)
        return rewards

    def _of_next_actor(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        name = agent_name(self.maze_env.actor_id())
        if (discrete := self._discrete.get(name)) is None:
            raise EnvironmentContractError(
                f"env: the next actor of {self.maze_env!r} is {name}; expected one of {self.possible_agents}."
            )
        self._waiting = with_numbers(observation, discrete)
        return {name: self._waiting}
