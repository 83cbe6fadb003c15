"""Maze environments the way RLlib steps them: flat ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats import LogStats, LogStatsConsumer, LogStatsLevel
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.interop.gymnasium_export import MazeGymnasiumEnv
from maze.train.parallelization.vector_env.stats_codec import EncodedStats, StatsDecoder, StatsEncoder
from maze.train.parallelization.vector_env.vector_env_utils import disable_epoch_level_stats
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
