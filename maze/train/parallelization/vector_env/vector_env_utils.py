"""Spaces and statistics of the environments in a vector environment, and encoding of statistics for other processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple, Union

import cloudpickle

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.faults import made_by
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import EnvironmentContractError
from maze.core.log_stats import log_stats
from maze.core.rollout.batched_acting import logits_shapes_of
from maze.core.rollout.rollout_columns import RolloutColumns, substeps_per_step
from maze.core.utils.config_utils import count_instances
from maze.core.wrappers.log_stats_wrapper import LogStatsWrapper
from maze.core.wrappers.maze_gym_env_wrapper import GymCoreEnv

# With a single actor, these methods complete a step with every action; overriding methods are called after each.
_FLAT_RULES = (CoreEnv.is_step_complete, GymCoreEnv.is_step_complete)


class SinkHoleConsumer(log_stats.LogStatsConsumer):
    """Discard all statistics."""

    @override(log_stats.LogStatsConsumer)
    def receive(self, stat: log_stats.LogStats) -> None:
        pass


class EpisodeRelay(log_stats.LogStatsAggregator):
    """Take the place of the epoch statistics of single environments and pass the statistics of each episode on.

    :param pass_on: Receives the statistics.
    """

    def __init__(self, pass_on: Callable[[log_stats.LogStats], None]) -> None:
        super().__init__(log_stats.LogStatsLevel.EPOCH)
        self._pass_on = pass_on

    @override(log_stats.LogStatsAggregator)
    def receive(self, stat: log_stats.LogStats) -> None:
        self._pass_on(stat)


def disable_epoch_level_stats(env: LogStatsWrapper) -> None:
    """Stop an environment from collecting its own epoch statistics.

    If several environments share an epoch aggregator, their own aggregators are never reduced and would only grow.

    :param env: An environment with statistics.
    """
    episode_stats = env.get_stats(log_stats.LogStatsLevel.EPISODE)
    with suppress(ValueError):  # it has been disabled before
        episode_stats.remove_consumer(env.get_stats(log_stats.LogStatsLevel.EPOCH))


def with_stats(env: Any) -> LogStatsWrapper:
    """Return the environment with episode statistics and without its own epoch statistics."""
    wrapped = env if isinstance(env, LogStatsWrapper) else LogStatsWrapper(env)
    disable_epoch_level_stats(wrapped)
    return wrapped


# Key of a statistic: module and name of the event, pickled event, output name, group.
_Reference = tuple[str, str, bytes, Union[str, None], Union[log_stats.LogStatsGroup, None]]


class PortableStats(dict[log_stats.LogStatsKey, Any]):
    """Statistics for another process, where their keys refer to the event methods of that process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, ([(_reference_of(key), value) for key, value in self.items()],)


def _received(encoded: list[tuple[_Reference, Any]]) -> log_stats.LogStats:
    return {_key_of(reference): value for reference, value in encoded}


@cache
def _reference_of(key: log_stats.LogStatsKey) -> _Reference:
    event = key.event
    return event.__module__, event.__qualname__, cloudpickle.dumps(event), key.output_name, key.group


@cache
def _key_of(reference: _Reference) -> log_stats.LogStatsKey:
    module, name, event, output_name, group = reference
    return log_stats.LogStatsKey(log_stats.event_named(module, name) or _unpickled(event), output_name, group)


@cache
def _unpickled(event: bytes) -> Any:
    return cloudpickle.loads(event)


class ActorSpaces(NamedTuple):
    """Spaces, agent counts and number of given instances, the same for all environments of a run."""

    observation_spaces_dict: dict[StepKeyType, Any]
    action_spaces_dict: dict[StepKeyType, Any]
    agent_counts_dict: dict[StepKeyType, int]
    n_instances: int = 0

    @classmethod
    def of(cls, env: Any) -> ActorSpaces:
        """Return the spaces of an environment or vector environment."""
        spaces = dict(env.observation_spaces_dict), dict(env.action_spaces_dict), dict(env.agent_counts_dict)
        return cls(*spaces, count_instances(env))

    def columns(self, n_envs: int, n_steps: int, policy: Any) -> RolloutColumns:
        """Return columns for rollouts with the logits of a policy."""
        n_ticks, shapes = n_steps * substeps_per_step(self.agent_counts_dict), logits_shapes_of(policy, self[1])
        return RolloutColumns(self.observation_spaces_dict, self.action_spaces_dict, n_envs, n_ticks, shapes)


class CheckedEnvFactory:
    """Environment factory with named errors: the environment cannot be made, or has unexpected spaces.

    :param env_factory: Makes one environment.
    :param spaces: Object with the expected spaces as attributes, such as an environment.
    """

    def __init__(self, env_factory: Callable[[], Any], spaces: Any) -> None:
        self.env_factory = env_factory
        self.spaces = spaces

    def __call__(self) -> Any:
        env = made_by(self.env_factory, "environment")
        check_same_spaces(self.spaces, env, "environment")
        return env


def check_same_spaces(reference: Any, env: Any, name: str) -> None:
    """Compare the spaces and agent counts of an environment with those of the first one.

    :param reference: The first environment, or an object with its spaces as attributes.
    :param env: The environment.
    :param name: Name of the environment, for the message.
    :raises EnvironmentContractError: They differ.
    """
    for attribute in ("observation_spaces_dict", "action_spaces_dict", "agent_counts_dict"):
        expected, found = dict(getattr(reference, attribute)), dict(getattr(env, attribute))
        if found != expected:
            raise EnvironmentContractError(
                f"{name}: all environments of a run need the same `{attribute}`. Expected {expected}, as in the first "
                f"environment, found {found}."
            )


def is_flat_env(env: Any) -> bool:
    """Return whether there is a single actor, each of whose actions completes an environment step."""
    core_env = getattr(env, "core_env", None)
    return (
        len(env.observation_spaces_dict) == 1
        and list(env.agent_counts_dict.values()) == [1]
        and core_env is not None
        and type(core_env).is_step_complete in _FLAT_RULES
    )
