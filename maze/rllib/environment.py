"""Maze environments the way RLlib steps them: flat ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.annotations import override
from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.interop.gymnasium_export import MazeGymnasiumEnv
from maze.train.parallelization.vector_env.vector_env_utils import (
    EncodedStats,
    StatsDecoder,
    StatsEncoder,
    disable_epoch_level_stats,
)
from maze.train.trainers.common.observation_statistics import Moments, ObservedRows


@dataclass(frozen=True)
class EnvConfig:
    """What an environment is made from, in any process.

    :param factory: Makes the Maze environment with all its wrappers.
    :param seed: Seed of the run's environments.
    :param is_single_action: Give RLlib the space of the only action head, without a dictionary around it.
    :param is_single_observation: The same for the only observation.
    :param normalized: Observations of which statistics are collected for running normalization.
    """

    factory: Callable[[], Any]
    seed: int
    is_single_action: bool = False
    is_single_observation: bool = False
    normalized: tuple[str, ...] = ()

    def to_rllib(self) -> dict[str, Any]:
        """RLlib's `env_config`."""
        return {"maze": self}


class FinishedEpisodes(LogStatsConsumer):
    """Statistics of the episodes that an environment has finished, until somebody takes them."""

    def __init__(self, env: LogStatsWrapper) -> None:
        self._episodes: list[LogStats] = []
        disable_epoch_level_stats(env)
        env.get_stats(LogStatsLevel.EPISODE).register_consumer(self)

    @override(LogStatsConsumer)
    def receive(self, stat: LogStats) -> None:
        self._episodes.append(stat)

    def take(self) -> list[EncodedStats]:
        """Those that nobody has taken yet, ready for another process: one encoder for all of them."""
        encoder = StatsEncoder()
        encoded = [encoder.encode(stats) for stats in self._episodes]
        self._episodes.clear()
        return encoded


def decode_episodes(encoded: list[EncodedStats]) -> list[LogStats]:
    """What :meth:`FinishedEpisodes.take` has encoded."""
    decoder = StatsDecoder()
    return [decoder.decode(stats) for stats in encoded]


class SeenObservations:
    """Statistics of the observations that were acted on, until somebody takes them.

    :param names: Which observations.
    :param env: The environment.
    """

    def __init__(self, names: Collection[str], env: Any) -> None:
        self._env = env
        self._rows = ObservedRows(names, env.observation_spaces_dict, 1)

    def add(self, observation: Mapping[str, Any]) -> None:
        """Takes an observation into account that the actor whose turn it is acts on."""
        if self._rows:
            rows = {name: np.asarray(value)[None] for name, value in observation.items()}
            self._rows.add(self._env.actor_id(), rows, slice(0, 1))

    def take(self) -> Moments | None:
        """Those that nobody has taken yet; `None`: there are none."""
        found = self._rows.of(0)
        self._rows.begin(0)
        return found


class SeedSource:
    """Different seeds for all environments of all workers, from RLlib's overlapping ones.

    RLlib seeds the environments of worker `w` with `seed + w`, `seed + w + 1` and so on, so that most of them
    have a twin in the next worker.

    :param seed: Seed of the run's environments.
    :param worker_index: Of the process that the environment lives in.
    """

    def __init__(self, seed: int, worker_index: int) -> None:
        self._entropy = (int(seed), int(worker_index))

    def seed_for(self, given: int) -> int:
        """A seed of its own for what RLlib calls `given` in this worker."""
        state = np.random.SeedSequence((*self._entropy, int(given))).generate_state(1, np.uint32)[0]
        return int(state >> 1)


def with_statistics(env: Any) -> Any:
    """The environment with statistics, unless it has some."""
    return env if isinstance(env, LogStatsWrapper) else LogStatsWrapper.wrap(env)


class MazeRLlibEnv(MazeGymnasiumEnv):
    """A flat Maze environment for RLlib, which makes one in each of its workers.

    :param context: RLlib's `EnvContext`: the :class:`EnvConfig` under `maze`, and the worker's index.
    """

    def __init__(self, context: Mapping[str, Any]) -> None:
        config: EnvConfig = context["maze"]
        env = with_statistics(config.factory())
        super().__init__(env)
        self._finished = FinishedEpisodes(env)
        self._seen = SeenObservations(config.normalized, env)
        self._latest: Mapping[str, Any] = {}
        self._seeds = SeedSource(config.seed, getattr(context, "worker_index", 0) or 0)
        self._head = _only_key(self.action_space, "action", config.is_single_action)
        self._observed = _only_key(self.observation_space, "observation", config.is_single_observation)
        if self._head is not None:
            self.action_space = _part(self.action_space, self._head)
        if self._observed is not None:
            self.observation_space = _part(self.observation_space, self._observed)

    @override(MazeGymnasiumEnv)
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=None if seed is None else self._seeds.seed_for(seed))

    @override(MazeGymnasiumEnv)
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._seen.add(self._latest)
        observation, reward, terminated, truncated, _ = super().step(
            action if self._head is None else {self._head: action}
        )
        return observation, reward, terminated, truncated, {}  # RLlib keeps all infos of all steps

    def take_statistics(self) -> list[EncodedStats]:
        """Statistics of the episodes finished since the last call."""
        return self._finished.take()

    def take_seen(self) -> Moments | None:
        """Statistics of what was acted on since the last call."""
        return self._seen.take()

    @override(MazeGymnasiumEnv)
    def _observation(self, observation: Any) -> Any:
        self._latest = observation
        converted = super()._observation(observation)
        # the first observation is converted before the constructor has come to its end
        return converted if getattr(self, "_observed", None) is None else converted[self._observed]


def _only_key(space: spaces.Space[Any], what: str, is_wanted: bool) -> str | None:
    """The only key of a dictionary space, where it is wanted."""
    if not is_wanted or not isinstance(space, spaces.Dict):
        return None
    if len(space.spaces) > 1:
        raise ConfigError(
            f"env: RLlib needs a single {what} here, but the environment has {list(space.spaces)}. Choose an algorithm "
            "that takes dictionaries of actions (ppo, appo, impala)."
        )
    return str(next(iter(space.spaces)))


def _part(space: spaces.Space[Any], key: str) -> spaces.Space[Any]:
    assert isinstance(space, spaces.Dict)
    return space.spaces[key]


def take_statistics_of_runner(env_runner: Any) -> list[list[EncodedStats]]:
    """Statistics of all environments of an env runner of RLlib; runs in its process."""
    return [env.take_statistics() for env in _envs_of(env_runner)]


def take_seen_of_runner(env_runner: Any) -> list[Moments]:
    """Statistics of what was acted on in all environments of an env runner of RLlib; runs in its process."""
    return [seen for env in _envs_of(env_runner) if (seen := env.take_seen())]


def _envs_of(env_runner: Any) -> list[Any]:
    envs = () if env_runner.env is None else getattr(env_runner.env.unwrapped, "envs", ())
    return [env.unwrapped for env in envs if hasattr(env.unwrapped, "take_statistics")]


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
