"""Estimation and reuse of normalization statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from maze.core.errors import ConfigError
from maze.core.log_stats.log_stats_env import LogStatsEnv
from maze.core.wrappers.observation_normalization.normalization_strategies.base import StructuredStatisticsType
from maze.core.wrappers.observation_normalization.observation_normalization_wrapper import (
    ObservationNormalizationWrapper,
)


def obtain_normalization_statistics(env: Any, n_samples: int) -> StructuredStatisticsType | None:
    """Statistics for the normalization of an environment's observations.

    Estimates what its configuration does not give, applies it to the environment, and writes it to the file that the
    wrapper names.

    :param env: The environment, with or without normalization.
    :param n_samples: Number of (sub-)steps to take for an estimation.
    :return: The statistics; None where the environment normalizes nothing.
    """
    if not isinstance(env, ObservationNormalizationWrapper):
        return None
    if env.names_to_estimate():
        estimate_observation_normalization_statistics(env, n_samples)
    env.dump_statistics()
    return env.get_statistics()


def estimate_observation_normalization_statistics(env: Any, n_samples: int) -> None:
    """Has the wrapper's sampling policy act, and estimates statistics from what it observes.

    :param env: Environment with an observation normalization wrapper somewhere in its stack.
    :param n_samples: Number of (sub-)steps to take.
    :raises ConfigError: The number of samples is not positive.
    """
    if type(n_samples) is not int or n_samples < 1:
        raise ConfigError(f"The number of samples for normalization statistics must be positive, got {n_samples!r}.")
    policy = env.build_sampling_policy(env.action_spaces_dict)
    names = ", ".join(env.names_to_estimate())
    print(
        f"-> collecting {n_samples:,} environment steps to estimate normalization statistics of {names} ...", flush=True
    )
    env.set_observation_collection(True)
    try:
        _take_steps(env, policy, n_samples)
    finally:
        env.set_observation_collection(False)
    env.estimate_statistics()
    env.reset()  # completes the statistics of the last episode, where they are collected
    if isinstance(env, LogStatsEnv):
        env.clear_epoch_stats()


def make_normalized_env_factory(
    env_factory: Callable[[], Any], normalization_statistics: StructuredStatisticsType | None
) -> Callable[[], Any]:
    """A factory of environments that normalize with given statistics.

    :param env_factory: Makes an environment.
    :param normalization_statistics: The statistics; None where nothing is normalized.
    """
    return (
        env_factory
        if normalization_statistics is None
        else _NormalizedEnvFactory(env_factory, normalization_statistics)
    )


class _NormalizedEnvFactory:
    """A class, so that it can be pickled.

    :param env_factory: Makes an environment.
    :param statistics: Its statistics.
    """

    def __init__(self, env_factory: Callable[[], Any], statistics: StructuredStatisticsType) -> None:
        self.env_factory = env_factory
        self.statistics = statistics

    def __call__(self) -> Any:
        env = self.env_factory()
        env.set_normalization_statistics(self.statistics)
        return env


def _take_steps(env: Any, policy: Any, n_steps: int) -> None:
    needs_state, needs_env = policy.needs_state(), policy.needs_env()
    observation = env.reset()
    for _ in range(n_steps):
        action = policy.compute_action(
            observation,
            maze_state=env.get_maze_state() if needs_state else None,
            env=env if needs_env else None,
            actor_id=env.actor_id(),
            deterministic=False,
        )
        observation, _, done, _ = env.step(action)
        if done:
            observation = env.reset()


def estimated_statistics(
    env: Any, env_factory: Callable[[], Any], n_samples: int, input_dir: str | None
) -> tuple[StructuredStatisticsType | None, Callable[[], Any]]:
    """Statistics for observation normalization where an environment asks for it, and a factory that uses them.

    :param env: One environment, seeded.
    :param env_factory: Makes such environments.
    :param n_samples: Number of observations to estimate from.
    :param input_dir: Directory of the run that is continued, whose statistics are taken over; empty: none.
    :return: The statistics (`None`: nothing is normalized), and the factory.
    """
    if not isinstance(env, ObservationNormalizationWrapper):
        return None, env_factory
    if input_dir and env.names_to_estimate():
        file = env.statistics_dump or Path("statistics.pkl")
        env.load_statistics(Path(input_dir) / file.name)
        env.dump_statistics()
        statistics: StructuredStatisticsType | None = env.get_statistics()
    else:
        statistics = obtain_normalization_statistics(env, n_samples=n_samples)
    return statistics, make_normalized_env_factory(env_factory, statistics)
