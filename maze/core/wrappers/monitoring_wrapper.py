"""Logs actions, observations and rewards as events."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.maze_env import MazeEnv
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.log_events.monitoring_events import ActionEvents, ObservationEvents, RewardEvents
from maze.core.wrappers.wrapper import Wrapper

FireAction = Callable[[ActionEvents, str, str, Any], None]
"""Fires the events of one action head: topic, step key, agent name, action."""


class MazeEnvMonitoringWrapper(Wrapper[MazeEnv[Any]]):
    """Fires events for what agents observe, do and get; statistics turn them into figures of their distributions.

    "Original" is what the Maze environment below all wrappers gives, "processed" what arrives here: wrappers that are
    to show up in the difference come before this one. Observations are those that agents acted on; the one after an
    episode's last step is not among them.

    Meant for inspection: all values of an epoch are kept until its statistics are written.

    :param env: The environment.
    :param observation_logging: Fire :class:`ObservationEvents`.
    :param action_logging: Fire :class:`ActionEvents`.
    :param reward_logging: Fire :class:`RewardEvents`.
    """

    keeps_observations_and_actions = True

    CLONED = ("_observation", "_original")

    TRANSIENT: ClassVar[tuple[str, ...]] = (*Wrapper.TRANSIENT, "_tap", "_actions", "_actor_id", "_context")

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
        self._context = self.env.context
        self._actor_id = self.env.actor_id
        self._tap = MazeEnvTap.install(self.env) if self.observation_logging or self.reward_logging else None
        self._actions = {key: _action_heads(space) for key, space in self.env.action_spaces_dict.items()}

    @override(Wrapper)
    def step(self, action: Any) -> tuple[Any, Any, bool, dict[Any, Any]]:
        # The events of the previous step must be gone before those of this one are fired.
        self._context.pre_step()
        actor = self._actor_id()
        step_key, agent = _names(actor)
        if self.observation_logging:
            self._log_observations(step_key, agent)
        if self.action_logging:
            self._log_actions(actor.step_key, step_key, agent, action)
        tap, n_seen = self._tap, 0
        if tap is not None:
            tap.rewards.clear()
            n_seen = tap.n_observations
        observation, reward, done, info = self._env_step(action)
        self._observation = observation
        if tap is not None:
            # A wrapper may answer a sub-step without asking the environment.
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

    def _log_observations(self, step_key: str, agent: str) -> None:
        events = self.observation_events
        if self._original is not None:
            actor, original = self._original
            _fire_each(events.observation_original, *_names(actor), original)
        _fire_each(events.observation_processed, step_key, agent, self._observation)

    def _log_actions(self, key: StepKeyType, step_key: str, agent: str, action: Any) -> None:
        is_dict = isinstance(action, Mapping)
        for name, fire in self._actions.get(key, {}).items():
            if not is_dict:
                fire(self.action_events, step_key, agent, action)
            elif name in action:
                fire(self.action_events, step_key, agent, action[name])


def step_key_name(step_key: StepKeyType) -> str:
    """How a sub-step is called in the monitoring events."""
    return f"step_key_{step_key}"


@cache
def _names(actor: ActorID) -> tuple[str, str]:
    """How an actor's sub-step and agent are called in the monitoring events."""
    return step_key_name(actor.step_key), f"agent_{actor.agent_id}"


def named_values(observation: Any) -> Mapping[str, Any]:
    """The parts of an observation by name; one that is no dictionary is called "observation"."""
    return observation if isinstance(observation, Mapping) else {"observation": observation}


def _fire_each(event: Callable[..., None], step_key: str, agent: str, observation: Any) -> None:
    for name, value in named_values(observation).items():
        # Environments and wrappers may use their arrays again for the next observation.
        event(step_key=step_key, agent_name=agent, name=name, value=np.array(value))


def _action_heads(space: spaces.Space[Any]) -> dict[str, FireAction]:
    """What to fire for each entry of an action space."""
    heads = space.spaces.items() if isinstance(space, spaces.Dict) else [("action", space)]
    return {name: fire for name, subspace in heads if (fire := _fire_function(name, subspace)) is not None}


def _fire_function(name: str, space: spaces.Space[Any]) -> FireAction | None:
    if isinstance(space, spaces.Discrete):
        n, start = int(space.n), int(space.start)

        def discrete(events: ActionEvents, step_key: str, agent: str, action: Any) -> None:
            events.discrete_action(step_key, agent, name, value=int(action) - start, action_dim=n)

        return discrete
    if isinstance(space, spaces.MultiDiscrete):
        sizes = space.nvec.ravel().tolist()

        def multi_discrete(events: ActionEvents, step_key: str, agent: str, action: Any) -> None:
            for index, (value, size) in enumerate(zip(np.ravel(action).tolist(), sizes, strict=True)):
                events.discrete_action(step_key, agent, f"{name}_{index}", value=int(value), action_dim=int(size))

        return multi_discrete
    if isinstance(space, spaces.MultiBinary):
        n_binary = int(np.prod(space.shape))

        def multi_binary(events: ActionEvents, step_key: str, agent: str, action: Any) -> None:
            for index in np.flatnonzero(np.ravel(action)).tolist():
                events.multi_binary_action(step_key, agent, name, value=index, num_binary_actions=n_binary)

        return multi_binary
    if isinstance(space, spaces.Box):

        def continuous(events: ActionEvents, step_key: str, agent: str, action: Any) -> None:
            events.continuous_action(step_key, agent, name, value=np.array(action, dtype=np.float64).ravel())

        return continuous
    return None


class MazeEnvTap:
    """Stands in the step path of a Maze environment and remembers its last observation and its rewards.

    Costs nothing where it is not installed. It is neither pickled nor copied with the environment; whoever needs it
    installs it anew.

    :param env: The Maze environment below all wrappers.
    :param path: Its step path.
    """

    def __init__(self, env: MazeEnv[Any], path: Any) -> None:
        self.env = env
        self.path = path
        self.observation: Any = None
        """The last observation."""
        self.n_observations = 0
        """How many observations there were so far."""
        self.rewards: list[float] = []
        """The rewards since the list was cleared, by a reset or by a user of the tap before it steps."""
        self.actor = ActorID(0, 0)
        """The actor that the last observation is for."""

    @classmethod
    def install(cls, env: Any) -> MazeEnvTap:
        """The tap of the Maze environment at the bottom of `env`; there is one, however often it is asked for."""
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
    """The Maze environment below all wrappers."""
    while not issubclass(type(env), MazeEnv):
        env = env.env
    return env  # type: ignore[no-any-return]
