"""Trainable environment: a simulation with its conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionBounds, ActionConversionInterface, action_problem, uses_state
from maze.core.env.core_env import CoreEnv
from maze.core.env.environment_context import EnvironmentContext
from maze.core.env.event_env_mixin import EventEnvMixin
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationConversionInterface, ObservationType
from maze.core.env.recordable_env_mixin import RecordableEnvMixin
from maze.core.env.simulated_env_mixin import Future
from maze.core.env.space_values import check_in_space
from maze.core.env.structured_env import ActorID, StepKeyType, StructuredEnv
from maze.core.env.structured_env_spaces_mixin import StructuredEnvSpacesMixin
from maze.core.env.time_env_mixin import TimeEnvMixin
from maze.core.errors import ConfigError, EnvironmentContractError, text_of
from maze.core.wrappers.wrapper import ObservationsAndActions, Wrapper

if TYPE_CHECKING:
    from maze.core.events.event_record import EventRecord
    from maze.core.log_events.kpi_calculator import KpiCalculator
    from maze.core.rendering.renderer import Renderer

CoreEnvType = TypeVar("CoreEnvType", bound=CoreEnv)
T = TypeVar("T")
ActionType = Any

# Number of observations of each sub-step that are checked; a check of all would be too slow.
_N_CHECKED_OBSERVATIONS = 3


class MazeEnv(
    Wrapper[CoreEnvType], StructuredEnv, StructuredEnvSpacesMixin, EventEnvMixin, RecordableEnvMixin, TimeEnvMixin
):
    """Wrap a core environment as an environment with observation and action spaces.

    :param core_env: The simulation.
    :param action_conversion_dict: Conversion of the agent's actions, by sub-step key.
    :param observation_conversion_dict: Conversion of states to observations, by sub-step key.
    """

    TRANSIENT = (*Wrapper.TRANSIENT, "step_path", "_simulation")

    converted_actor: ActorID | None = None
    """The actor whose recorded states and actions are being converted, see :meth:`converting`."""

    def __init__(
        self,
        core_env: CoreEnvType,
        action_conversion_dict: Mapping[StepKeyType, ActionConversionInterface],
        observation_conversion_dict: Mapping[StepKeyType, ObservationConversionInterface],
    ) -> None:
        _check_conversions(type(self).__name__, action_conversion_dict, observation_conversion_dict)
        self.action_conversion_dict = dict(action_conversion_dict)
        self.observation_conversion_dict = dict(observation_conversion_dict)
        self._action_spaces = {key: conv.space() for key, conv in self.action_conversion_dict.items()}
        self._observation_spaces = {key: conv.space() for key, conv in self.observation_conversion_dict.items()}
        self.last_maze_action: MazeActionType | None = None
        """The last action of the simulation."""
        super().__init__(core_env)

    @override(Wrapper)
    def _bind(self) -> None:
        self.step_path = _StepPath(self)
        self._simulation = self.env  # without the lookup in the wrapper

    @property
    def core_env(self) -> CoreEnvType:
        """The simulation; the same as `env`. May be replaced by another one with the same context."""
        return self.env

    @core_env.setter
    def core_env(self, core_env: CoreEnvType) -> None:
        self.env = core_env

    @property
    def context(self) -> EnvironmentContext:
        """Services shared by the simulation and its wrappers."""
        return self.env.context

    @override(StructuredEnv)
    def step(self, action: ActionType) -> tuple[ObservationType, float, bool, dict[Any, Any]]:
        """Take an action; values of bounded `Box` heads are clipped."""
        return self.step_path.step(action)

    @override(StructuredEnv)
    def reset(self) -> ObservationType:
        return self.step_path.reset()

    @override(StructuredEnv)
    def seed(self, seed: Any) -> None:
        """Seed the simulation, the action spaces and the identities of the next episodes."""
        self.env.seed(seed)
        self.context.set_seed(seed)
        if seed is None or isinstance(seed, (int, np.integer)):
            for space in self._action_spaces.values():
                space.seed(None if seed is None else int(seed))

    @override(StructuredEnv)
    def close(self) -> None:
        self.env.close()

    @override(EventEnvMixin)
    def get_step_events(self) -> Iterable[EventRecord]:
        return self.env.get_step_events()

    @override(EventEnvMixin)
    def get_kpi_calculator(self) -> KpiCalculator | None:
        return self._simulation.get_kpi_calculator()

    @override(RecordableEnvMixin)
    def get_maze_state(self) -> MazeStateType:
        return self.env.get_maze_state()

    @override(RecordableEnvMixin)
    def get_maze_action(self) -> MazeActionType:
        return self.last_maze_action

    @override(RecordableEnvMixin)
    def get_episode_id(self) -> str:
        return self.context.episode_id

    @override(RecordableEnvMixin)
    def get_renderer(self) -> Renderer | None:
        return self.env.get_renderer()

    @property
    @override(StructuredEnvSpacesMixin)
    def action_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        return self._action_spaces

    @property
    @override(StructuredEnvSpacesMixin)
    def observation_spaces_dict(self) -> dict[StepKeyType, spaces.Dict]:
        return self._observation_spaces

    @override(TimeEnvMixin)
    def get_env_time(self) -> int:
        return self.env.get_env_time()

    @override(StructuredEnv)
    def actor_id(self) -> ActorID:
        if self.converted_actor is not None:
            return self.converted_actor
        actor: Any = self.env.actor_id()
        if isinstance(actor, ActorID):
            return actor
        try:
            return ActorID(*actor)
        except TypeError:
            raise EnvironmentContractError(
                f"{type(self.env).__name__}.actor_id() must return ActorID(step_key, agent_id), found {actor!r}."
            ) from None

    @override(StructuredEnv)
    def is_actor_done(self) -> bool:
        return bool(self._simulation.is_actor_done())

    @property
    @override(StructuredEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        counts: Any = self.env.agent_counts_dict
        if callable(counts):  # some simulations define a method
            counts = counts()
        if counts is not None:
            return dict(counts)
        if len(self.action_conversion_dict) == 1:
            return dict.fromkeys(self.action_conversion_dict, 1)
        raise EnvironmentContractError(
            f"{type(self.env).__name__}.agent_counts_dict: expected the number of agents of each sub-step, found None."
        )

    @override(StructuredEnv)
    def get_actor_rewards(self) -> np.ndarray | None:
        return self.env.get_actor_rewards()

    @property
    @override(StructuredEnvSpacesMixin)
    def action_space(self) -> spaces.Dict:
        return self._of_current_actor(self._action_spaces, "action space")

    @property
    @override(StructuredEnvSpacesMixin)
    def observation_space(self) -> spaces.Dict:
        return self._of_current_actor(self._observation_spaces, "observation space")

    @property
    def action_conversion(self) -> ActionConversionInterface:
        """Conversion of the actions of the next actor."""
        return self._of_current_actor(self.action_conversion_dict, "action conversion")

    @property
    def observation_conversion(self) -> ObservationConversionInterface:
        """Conversion of states to observations of the next actor."""
        return self._of_current_actor(self.observation_conversion_dict, "observation conversion")

    def _of_current_actor(self, by_step_key: Mapping[StepKeyType, T], what: str) -> T:
        if len(by_step_key) == 1:
            return next(iter(by_step_key.values()))
        actor = self.actor_id()
        try:
            return by_step_key[actor.step_key]
        except KeyError:
            raise EnvironmentContractError(
                f"{type(self).__name__}: no {what} for sub-step {actor.step_key!r}. Known sub-steps: {[*by_step_key]}."
            ) from None

    @override(Wrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        actor = self.converted_actor
        keys = self.action_conversion_dict if actor is None else (actor.step_key,)
        observations = actions = None
        if maze_state is not None:
            observations = {key: self.observation_conversion_dict[key].maze_to_space(maze_state) for key in keys}
        if maze_action is not None:
            actions = {key: self.action_conversion_dict[key].maze_to_space(maze_action) for key in keys}
        return observations, actions

    @contextmanager
    def converting(self, actor_id: ActorID) -> Iterator[None]:
        """Convert recorded states and actions as those of one actor within this block.

        :param actor_id: The actor, which :meth:`actor_id` returns within the block.
        :raises EnvironmentContractError: The environment has no such sub-step.
        """
        if actor_id.step_key not in self.action_conversion_dict:
            raise EnvironmentContractError(
                f"{type(self).__name__}: expected recordings of known sub-steps, found {actor_id.step_key!r}; "
                f"known sub-steps: {list(self.action_conversion_dict)}. Were they recorded in another environment?"
            )
        self.converted_actor = actor_id
        try:
            yield
        finally:
            del self.converted_actor

    @override(Wrapper)
    def clone_from(self, env: MazeEnv[CoreEnvType], future: Future = "same") -> None:
        self.context.clone_from(env.context)
        self.last_maze_action = env.get_maze_action()
        if env.core_env.is_simulated:
            self.env.clone_from(env.core_env)
        else:
            self.env.load_maze_state(env.get_maze_state(), env.actor_id())
        self.renew_future(future)


class _StepPath:
    """Hot path of a Maze environment, separate from it because attribute lookups of wrappers are slow.

    :param env: The environment. Methods that a subclass of MazeEnv overrides are called.
    """

    def __init__(self, env: MazeEnv[Any]) -> None:
        self.env = env
        self.core_env: CoreEnv = env.env
        self.context: EnvironmentContext = self.core_env.context
        self.action_conversions = env.action_conversion_dict
        self.observation_conversions = env.observation_conversion_dict
        self.get_maze_state = env.get_maze_state if _overrides(env, "get_maze_state") else self.core_env.get_maze_state
        self.tracks_actors = type(self.core_env).is_step_complete is CoreEnv.is_step_complete
        is_chosen_elsewhere = any(_overrides(env, name) for name in ("action_conversion", "observation_conversion"))
        has_choice = len(env.action_conversion_dict) != 1 or is_chosen_elsewhere
        self.converts_by_state = is_chosen_elsewhere or any(map(uses_state, self.action_conversions.values()))
        self.only_key = None if has_choice else next(iter(env.action_conversion_dict))
        """Key of the only sub-step; `None`: there are several, or a subclass selects conversions."""
        self.unchecked = dict.fromkeys(env.observation_conversion_dict, _N_CHECKED_OBSERVATIONS)
        self.bounds = {key: ActionBounds(conversion.space()) for key, conversion in self.action_conversions.items()}
        self.clip: Callable[[ActionType], ActionType] | None = None
        """Clips continuous actions to their bounds; `None`: there are no bounds."""
        if any(self.bounds.values()):
            self.clip = self._clip_to_current if self.only_key is None else self.bounds[self.only_key].clip

    def step(self, action: ActionType) -> tuple[ObservationType, float, bool, dict[Any, Any]]:
        env, core_env, context, only_key = self.env, self.core_env, self.context, self.only_key
        if context.is_episode_over:
            raise EnvironmentContractError(
                f"{self.place()}: the episode is over after {context.step_id} steps; expected `reset`, found `step`."
            )
        context.pre_step()
        if self.tracks_actors and context.step_actor_id is None:
            context.step_actor_id = core_env.actor_id()

        conversion = env.action_conversion if only_key is None else self.action_conversions[only_key]
        try:
            if self.clip is not None:
                action = self.clip(action)
            state_before = self.get_maze_state() if self.converts_by_state else None
            maze_action = env.last_maze_action = conversion.space_to_maze(action, state_before)
            result = core_env.step(maze_action)
            try:
                maze_state, reward, done, info = result
                if info.__class__ is not dict and not isinstance(info, Mapping | None):  # None: the checker reports it
                    raise TypeError("`info` is no dictionary")
            except (TypeError, ValueError) as error:
                found = (
                    f"({', '.join(type(each).__name__ for each in result)})" if type(result) is tuple else repr(result)
                )
                raise EnvironmentContractError(
                    f"{type(core_env).__name__}.step: expected (state, reward, done, info), found {found:.200}."
                ) from error
        except Exception as error:
            # Errors of the simulation pass, unless the action was no element of its space.
            if (problem := action_problem(action, conversion.space())) is not None:
                raise EnvironmentContractError(f"{self.place()}: {problem} ({text_of(error)}).") from error
            raise
        if reward.__class__ is not float:
            reward = _scalar_reward(reward, core_env)

        context.n_substeps += 1
        # The end of an episode completes the step.
        if done or context.is_step_complete or core_env.is_step_complete():
            context.increment_env_step()
            context.is_episode_over = bool(done)
        context.run_post_step_callbacks()
        return self.observe(maze_state), reward, bool(done), info

    def _clip_to_current(self, action: ActionType) -> ActionType:
        bounds = self.bounds.get(self.core_env.actor_id()[0])
        return bounds.clip(action) if bounds else action

    def place(self) -> str:
        """Return the environment and sub-step, for messages."""
        step_key = self.core_env.actor_id()[0] if self.only_key is None else self.only_key
        return f"{type(self.env).__name__} ({type(self.core_env).__name__}), sub-step {step_key!r}"

    def reset(self) -> ObservationType:
        self.context.reset_env_episode()
        self.env.last_maze_action = None
        return self.observe(self.core_env.reset())

    def observe(self, maze_state: MazeStateType) -> ObservationType:
        """Return the observation of the next actor."""
        only_key = self.only_key
        conversion = self.env.observation_conversion if only_key is None else self.observation_conversions[only_key]
        observation = conversion.maze_to_space(maze_state)
        if self.unchecked:
            step_key, agent_id = self.env.actor_id()
            step_key = step_key if only_key is None else only_key
            if step_key in self.unchecked:
                count = self.env.agent_counts_dict.get(step_key, -1)
                if count >= 0 and agent_id not in range(count):
                    raise EnvironmentContractError(
                        f"{type(self.env).__name__}, sub-step {step_key!r}: actor_id() gave agent {agent_id!r}, but "
                        f"agent_counts_dict declares {count} agent(s), counted from 0; -1 if the number varies."
                    )
                check_in_space(observation, self.env.observation_space, type(self.env).__name__, step_key)
                self.unchecked[step_key] -= 1
                if self.unchecked[step_key] == 0:
                    del self.unchecked[step_key]
        return observation


def _overrides(env: MazeEnv[Any], name: str) -> bool:
    return getattr(type(env), name) is not getattr(MazeEnv, name)


def _scalar_reward(reward: Any, core_env: CoreEnv) -> float:
    try:
        return float((reward.item() if isinstance(reward, np.ndarray) else reward) + 0)  # no text: float("3") is 3
    except (TypeError, ValueError):
        raise EnvironmentContractError(
            f"{type(core_env).__name__}.step() must return one number as the reward, found {reward!r}; see "
            "get_actor_rewards()."
        ) from None


def _check_conversions(
    env_name: str,
    actions: Mapping[StepKeyType, ActionConversionInterface],
    observations: Mapping[StepKeyType, ObservationConversionInterface],
) -> None:
    both: Any = ((actions, ActionConversionInterface), (observations, ObservationConversionInterface))
    is_sound = all(
        isinstance(given, Mapping) and all(isinstance(each, interface) for each in given.values())
        for given, interface in both
    )
    if not is_sound or not actions or actions.keys() != observations.keys():
        raise ConfigError(
            f"{env_name}: action_conversion_dict and observation_conversion_dict must map the same sub-step keys to "
            f"conversions, as {{0: conversion}}; found {actions!r} and {observations!r}."
        )
