"""Logging of actions, observations, rewards and durations as events."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from functools import cache
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.log_events.monitoring_events import ActionEvents, ObservationEvents, RewardEvents
from maze.core.log_stats.event_decorators import (
    define_episode_stats,
    define_epoch_stats,
    define_stats_grouping,
    define_step_stats,
)
from maze.core.wrappers.wrapper import Wrapper


class MazeEnvMonitoringWrapper(Wrapper[MazeEnv[Any]]):
    """Fire events for observations, actions and rewards, whose statistics are figures of their distributions.

    "Original" values are those of the Maze environment below all wrappers, "processed" values those at this wrapper.
    Observations are those that agents act on; the last observation of an episode is not among them.

    For inspection: all values of an epoch are kept in memory until its statistics are written.

    :param env: The environment.
    :param observation_logging: Fire :class:`ObservationEvents`.
    :param action_logging: Fire :class:`ActionEvents`.
    :param reward_logging: Fire :class:`RewardEvents`.
    """

    keeps_observations_and_actions = True

    CLONED = ("_observation", "_original")

    TRANSIENT: ClassVar[tuple[str, ...]] = (*Wrapper.TRANSIENT, "_tap", "_actions", "_actor_id")

    def __init__(
        self, env: MazeEnv[Any], observation_logging: bool, action_logging: bool, reward_logging: bool
    ) -> None:
        self.observation_logging = observation_logging
        self.action_logging = action_logging
        self.reward_logging = reward_logging
        self._observation: Any = None
        self._original: tuple[ActorID, Any] | None = None
        super().__init__(env)
        events = self._context.event_service
        self.observation_events = events.create_event_topic(ObservationEvents)
        self.action_events = events.create_event_topic(ActionEvents)
        self.reward_events = events.create_event_topic(RewardEvents)

    @override(Wrapper)
    def _bind(self) -> None:
        super()._bind()
        self._actor_id = self.env.actor_id
        self._tap = MazeEnvTap.install(self.env) if self.observation_logging or self.reward_logging else None
        action_spaces: Mapping[StepKeyType, spaces.Space[Any]] = self.env.action_spaces_dict
        self._actions: dict[StepKeyType, Mapping[str, spaces.Space[Any]]] = {
            key: space.spaces if isinstance(space, spaces.Dict) else {"action": space}
            for key, space in action_spaces.items()
        }

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        # Drops the events of the previous step before those of this one are fired.
        self._context.pre_step()
        actor = self._actor_id()
        step_key, agent = _names(actor)
        if self.observation_logging:
            if self._original is not None:
                _fire_each(self.observation_events.observation_original, *_names(self._original[0]), self._original[1])
            _fire_each(self.observation_events.observation_processed, step_key, agent, self._observation)
        if self.action_logging:
            values = action if isinstance(action, Mapping) else {"action": action}
            for name, space in self._actions.get(actor.step_key, {}).items():
                if name in values:
                    _fire_action(self.action_events, step_key, agent, name, space, values[name])
        tap, n_seen = self._tap, 0
        if tap is not None:
            tap.rewards.clear()
            n_seen = tap.n_observations
        observation, reward, done, info = self._env_step(action)
        self._observation = observation
        if tap is not None:
            # A wrapper may answer a sub-step without stepping the environment.
            self._original = (tap.actor, tap.observation) if tap.n_observations > n_seen else None
        if self.reward_logging:
            assert tap is not None
            for original in tap.rewards:
                self.reward_events.reward_original(value=original)
            self.reward_events.reward_processed(step_key=step_key, agent_name=agent, value=float(reward))
        return observation, reward, done, info

    @override(Wrapper)
    def reset(self) -> Any:
        self._observation = self._env_reset()
        if self._tap is not None:
            self._original = self._tap.actor, self._tap.observation
        return self._observation


def step_key_name(step_key: StepKeyType) -> str:
    """Return the name of a sub-step in the monitoring events."""
    return f"step_key_{step_key}"


@cache
def _names(actor: ActorID) -> tuple[str, str]:
    """Return the names of an actor's sub-step and agent in the monitoring events."""
    return step_key_name(actor.step_key), f"agent_{actor.agent_id}"


def named_values(observation: Any) -> Mapping[str, Any]:
    """Return the parts of an observation by name; an observation without names is called "observation"."""
    return observation if isinstance(observation, Mapping) else {"observation": observation}


def _fire_each(event: Callable[..., None], step_key: str, agent: str, observation: Any) -> None:
    for name, value in named_values(observation).items():
        # Environments and wrappers may reuse their arrays for the next observation.
        event(step_key=step_key, agent_name=agent, name=name, value=np.array(value))


def _fire_action(
    events: ActionEvents, step_key: str, agent: str, name: str, space: spaces.Space[Any], action: Any
) -> None:
    """Fire the events of one action head."""
    if isinstance(space, spaces.Discrete):
        events.discrete_action(step_key, agent, name, value=int(action) - int(space.start), action_dim=int(space.n))
    elif isinstance(space, spaces.MultiDiscrete):
        from_zero = np.ravel(np.asarray(action) - space.start)
        for index, (value, size) in enumerate(zip(from_zero, space.nvec.ravel(), strict=True)):
            events.discrete_action(step_key, agent, f"{name}_{index}", value=int(value), action_dim=int(size))
    elif isinstance(space, spaces.MultiBinary):
        for index in np.flatnonzero(np.ravel(action)).tolist():
            n_binary = int(np.prod(space.shape))
            events.multi_binary_action(step_key, agent, name, value=index, num_binary_actions=n_binary)
    elif isinstance(space, spaces.Box):
        events.continuous_action(step_key, agent, name, value=np.array(action, dtype=np.float64).ravel())


class MazeEnvTap:
    """Store the last observation and the rewards of a Maze environment, as a part of its step path.

    It is neither pickled nor copied with the environment; wrappers that need it install it again.

    :param env: The Maze environment below all wrappers.
    :param path: Its step path.
    """

    def __init__(self, env: MazeEnv[Any], path: Any) -> None:
        self.env = env
        self.path = path
        self.observation: Any = None
        """The last observation."""
        self.n_observations = 0
        """Number of observations so far."""
        self.rewards: list[float] = []
        """The rewards since the list was cleared: by a reset, or by a wrapper before it steps."""
        self.actor = ActorID(0, 0)
        """The actor of the last observation."""

    @classmethod
    def install(cls, env: Any) -> MazeEnvTap:
        """Return the tap of the Maze environment below all wrappers; it is created once."""
        maze_env = base_maze_env(env)
        path: Any = maze_env.step_path
        if not isinstance(path, cls):
            path = maze_env.__dict__["step_path"] = cls(maze_env, path)
        return path  # type: ignore[no-any-return]

    def step(self, action: Any) -> Any:
        result = self.path.step(action)
        self._observe(result[0])
        self.rewards.append(result[1])
        return result

    def reset(self) -> Any:
        observation = self.path.reset()
        self.rewards.clear()
        self._observe(observation)
        return observation

    def _observe(self, observation: Any) -> None:
        self.observation = observation
        self.n_observations += 1
        self.actor = self.env.actor_id()


def base_maze_env(env: Any) -> MazeEnv[Any]:
    """Return the Maze environment below all wrappers.

    :param env: A Maze environment with or without wrappers.
    :raises AttributeError: There is no Maze environment.
    """
    while not issubclass(type(env), MazeEnv):
        env = env.env
    return env  # type: ignore[no-any-return]


# -- durations of steps and resets by layer: environment and wrappers --------------------------------------------------


class StepTimingEvents(ABC):
    """Time spent in an environment and in each of its wrappers, without the layers below."""

    @define_epoch_stats(np.mean, input_name="mean", output_name="mean_ms")
    @define_epoch_stats(sum, input_name="sum", output_name="total_ms")
    @define_episode_stats(np.mean, output_name="mean")
    @define_episode_stats(sum, output_name="sum")
    @define_step_stats(sum)
    @define_stats_grouping("layer")
    def step_time(self, layer: str, value: float) -> None:
        """A step was taken.

        :param layer: The wrapper or environment; 0 is the environment itself, as in "1_TimeLimitWrapper".
        :param value: Milliseconds.
        """

    @define_epoch_stats(np.mean, output_name="mean_ms")
    @define_episode_stats(sum)
    @define_step_stats(sum)
    @define_stats_grouping("layer")
    def reset_time(self, layer: str, value: float) -> None:
        """The environment was reset.

        :param layer: The wrapper or environment.
        :param value: Milliseconds.
        """


class _Probe(Wrapper[Any]):
    """Measure the time spent in a layer of a stack and in all layers below it.

    :param env: The inner layer.
    """

    keeps_observations_and_actions = True

    def __init__(self, env: Any) -> None:
        self.seconds = 0.0
        super().__init__(env)

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        start = perf_counter()
        result = self._env_step(action)
        self.seconds += perf_counter() - start
        return result

    @override(Wrapper)
    def reset(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        result = self._env_reset(*args, **kwargs)
        self.seconds += perf_counter() - start
        return result


class StepTimingWrapper(Wrapper[MazeEnv[Any]]):
    """Fire :class:`StepTimingEvents` for the environment and every wrapper that it is put around.

    The time of a layer excludes the layers below it. Layers are subclasses of `Wrapper`; the Maze environment with its
    conversions is one layer. The overhead is a few microseconds per layer.

    :param env: The environment with all wrappers to measure.
    """

    keeps_observations_and_actions = True

    TRANSIENT: ClassVar[tuple[str, ...]] = (*Wrapper.TRANSIENT, "_probes", "_layers")

    def __init__(self, env: MazeEnv[Any]) -> None:
        super().__init__(_probed(env))
        self.timing_events = self._context.event_service.create_event_topic(StepTimingEvents)

    @override(Wrapper)
    def _bind(self) -> None:
        super()._bind()
        self._probes: list[Any] = [self.env]
        while not issubclass(type(self._probes[-1].env), MazeEnv):
            self._probes.append(self._probes[-1].env.env)
        n_layers = len(self._probes)
        self._layers = [f"{n_layers - 1 - i}_{type(probe.env).__name__}" for i, probe in enumerate(self._probes)]

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        return self._timed(self.timing_events.step_time, self._env_step, action)  # type: ignore[no-any-return]

    @override(Wrapper)
    def reset(self) -> Any:
        return self._timed(self.timing_events.reset_time, self._env_reset)

    def _timed(self, event: Any, call: Any, *arguments: Any) -> Any:
        for probe in self._probes:
            probe.seconds = 0.0
        result = call(*arguments)
        below = [*(probe.seconds for probe in self._probes[1:]), 0.0]
        for layer, probe, inner in zip(self._layers, self._probes, below, strict=True):
            event(layer=layer, value=1000.0 * max(0.0, probe.seconds - inner))
        return result


def _probed(env: Any) -> Any:
    """Put a probe around each layer of an environment; return the outermost one."""
    if not issubclass(type(env), MazeEnv):
        env.env = _probed(env.env)
    return _Probe(env)
