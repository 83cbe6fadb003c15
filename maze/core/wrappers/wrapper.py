"""Base classes of wrappers."""

from __future__ import annotations

import copy
import copyreg
import re
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import gymnasium
import numpy as np
from typing_extensions import Self

from maze.core.annotations import override
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_state import MazeStateType
from maze.core.env.simulated_env_mixin import Future, SimulatedEnvMixin
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import ConfigValueError, EnvironmentContractError, did_you_mean

if TYPE_CHECKING:
    from maze.core.env.maze_env import MazeEnv


class WrapperMeta(ABCMeta):
    """Metaclass of wrappers, whose `repr` names the export to gymnasium.

    Other libraries reject objects that are not gymnasium environments with a message that shows their class only.
    """

    def __repr__(cls) -> str:
        path = f"{cls.__module__}.{cls.__qualname__}"
        return f"<class '{path}' (from maze.interop import to_gymnasium; env = to_gymnasium(env))>"


class _ClassViewMeta(ABCMeta):
    """Metaclass of views, whose method resolution order is given explicitly."""

    shown_mro: tuple[type, ...]
    real_type: type

    def mro(cls) -> list[type]:
        shown: tuple[type, ...] = cls.__dict__["shown_mro"]
        return [cls, *shown]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.real_type(*args, **kwargs)


@lru_cache(maxsize=1024)
def class_view(outer: type, inner: type) -> type:
    """Return a class that is a subclass of all base classes of `outer` and `inner`.

    :param outer: The real class of the wrapper; first in the order.
    :param inner: `__class__` of the wrapped environment, itself a view if that is a wrapper.
    """
    own = [klass for klass in outer.__mro__ if klass is not object]
    wrapped = [k for k in inner.__mro__ if k is not object and k not in own and not isinstance(k, _ClassViewMeta)]
    try:
        return _make_view(outer, (*own, *wrapped, object))
    except TypeError:
        # Classes with a special memory layout (slots, extension types) cannot be combined with others.
        return _make_view(outer, (*own, *(k for k in wrapped if _has_plain_layout(k)), object))


def _make_view(outer: type, mro: tuple[type, ...]) -> type:
    namespace = {
        "shown_mro": mro,
        "real_type": outer,
        "__module__": outer.__module__,
        "__qualname__": outer.__qualname__,
        "__doc__": outer.__doc__,
    }
    return _ClassViewMeta(outer.__name__, (), namespace)


def _has_plain_layout(klass: type) -> bool:
    try:
        _make_view(object, (klass, object))
    except TypeError:
        return False
    return True


def _identity(klass: type) -> Any:
    return klass


copyreg.pickle(_ClassViewMeta, lambda view: (_identity, (view.real_type,)))


EnvType = TypeVar("EnvType")
T = TypeVar("T")

ObservationsAndActions = tuple[dict[StepKeyType, Any] | None, dict[StepKeyType, Any] | None]
"""Observations and actions by sub-step key; `None` if they were not requested."""


_NOT_WRAPPING = (
    "{} has no attribute `{}`, and wraps no environment yet; call `super().__init__(env)` first in the constructor."
)


class Wrapper(Generic[EnvType], SimulatedEnvMixin, metaclass=WrapperMeta):
    """Wrap an environment of any kind.

    Attributes that the wrapper does not have are looked up in the wrapped environment `env`, and the wrapper is an
    instance of the classes of all environments and wrappers of the stack.

    :param env: The environment to wrap.
    """

    TRANSIENT: ClassVar[tuple[str, ...]] = ("_env_step", "_env_reset", "_is_gymnasium", "_context")
    """Attributes set by :meth:`_bind`; they are neither pickled nor copied."""

    CLONED: ClassVar[tuple[str, ...]] = ()
    """Attributes of which :meth:`clone_from` takes a shallow copy; their values must be replaced, never modified."""

    keeps_observations_and_actions: ClassVar[bool] = False
    """Whether observations and actions are those without this wrapper, of recorded states as well."""

    def __init__(self, env: EnvType) -> None:
        self.env = env

    @property
    def env(self) -> EnvType:
        """The wrapped environment; may be replaced.

        :raises AttributeError: The wrapper wraps no environment yet.
        """
        try:
            return self.__dict__["_wrapped_env"]  # type: ignore[no-any-return]
        except KeyError:
            raise AttributeError(_NOT_WRAPPING.format(type(self).__name__, "env")) from None

    @env.setter
    def env(self, env: EnvType) -> None:
        self.__dict__["_wrapped_env"] = env
        self._bind()

    def _bind(self) -> None:
        """Bind the methods of the environment for the hot path.

        Called when `env` is assigned, and after unpickling and copying.
        """
        env: Any = self.env
        self._env_step = env.step
        self._env_reset = env.reset
        self._is_gymnasium = isinstance(env, gymnasium.Env)
        self._context: Any = None if self._is_gymnasium else getattr(env, "context", None)

    def step(self, action: Any) -> Any:
        """Step the wrapped environment.

        :param action: Action, as the wrapped environment takes it.
        :return: Observation, reward, done and info; around a gymnasium environment observation, reward, terminated,
            truncated and info.
        """
        return self._env_step(action)

    def reset(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a new episode of the wrapped environment, to which the arguments are passed on.

        :param args: Gymnasium environments take none by position, Maze environments none at all.
        :param kwargs: Gymnasium environments take `seed` and `options`.
        :return: The first observation; around a gymnasium environment observation and info.
        """
        return self._env_reset(*args, **kwargs)

    def step_with_callbacks(self, *args: Any, **kwargs: Any) -> Any:
        """Step, and run the post-step callbacks after the step of this outermost wrapper.

        Without this method they run when the Maze environment has been stepped, before the outer wrappers return. After
        an error they do not run.

        :param args: Arguments of :meth:`step`.
        :param kwargs: The same, by name.
        :return: The result of :meth:`step`.
        """
        with self.context.deferred_post_step_callbacks():
            return self.step(*args, **kwargs)

    @classmethod
    def wrap(cls, env: T, *args: Any, **kwargs: Any) -> T | Self:
        """Wrap `env`; equal to calling the class, but typed as both.

        :param env: Environment to wrap.
        :param args: Further arguments of the constructor.
        :param kwargs: The same, by name.
        """
        return cls(env, *args, **kwargs)  # type: ignore[arg-type]

    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        """Convert recorded states and actions of the simulation to observations and actions of the agent.

        :param maze_state: State; None if observations are not needed.
        :param maze_action: Action; None if actions are not needed.
        :param first_step_in_episode: Whether the state is the first of its episode (for wrappers with a state).
        :return: Observations and actions by sub-step key.
        :raises NotImplementedError: The wrapper does not implement the conversion.
        """
        if not self.keeps_observations_and_actions:
            raise NotImplementedError(
                f"{type(self).__name__} needs get_observation_and_action_dicts, or keeps_observations_and_actions=True."
            )
        env: Any = self.env
        dicts: ObservationsAndActions = env.get_observation_and_action_dicts(
            maze_state, maze_action, first_step_in_episode
        )
        return dicts

    @override(SimulatedEnvMixin)
    def clone_from(self, env: Any, future: Future = "same") -> None:
        """Take over the state of an environment with the same wrappers.

        The attributes in `CLONED` are copied; wrappers with further state override this method and call it.
        :meth:`new_future` is passed on to the environment.

        :raises EnvironmentContractError: The other environment has other wrappers.
        """
        if type(env) is not type(self):
            raise EnvironmentContractError(
                f"{type(self).__name__}.clone_from: expected the same wrappers, found {type(env).__name__}."
            )
        inner: Any = self.env
        inner.clone_from(env.env)
        for name in self.CLONED:
            setattr(self, name, copy.copy(getattr(env, name)))
        self.renew_future(future)

    @override(SimulatedEnvMixin)
    def new_future(self, seed: int) -> None:
        inner: Any = self.env
        inner.new_future(seed)

    @override(SimulatedEnvMixin)
    def set_fast_step(self, do_fast_step: bool) -> None:
        inner = getattr(self.env, "set_fast_step", None)
        if inner is not None:
            inner(do_fast_step)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        """The class for `isinstance`; `type(wrapper)` is the real one."""
        env = self.__dict__.get("_wrapped_env")
        return type(self) if env is None else class_view(type(self), env.__class__)

    def __getattr__(self, name: str) -> Any:
        # Called if normal lookup fails, or if a property raises an AttributeError.
        for klass in type(self).__mro__:
            if name in klass.__dict__:
                # A lookup in the wrapped environment would hide the error of the property.
                return klass.__dict__[name].__get__(self, type(self))
        if "_wrapped_env" not in self.__dict__:
            raise AttributeError(_NOT_WRAPPING.format(type(self).__name__, name))
        if name.startswith("_"):
            raise AttributeError(
                f"{type(self).__name__} has no attribute `{name}`; use `.env` for private ones of the environment."
            )
        try:
            return getattr(self.env, name)
        except AttributeError as error:
            if getattr(error, "name", name) != name:
                raise
            raise AttributeError(f"{self!r} has no attribute `{name}`.", name=name, obj=self) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.__dict__.get('_wrapped_env')!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in self.TRANSIENT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The inherited method uses `__class__`, which is not the class to create.
        return _new_instance, (type(self),), self.__getstate__()


class PassiveWrapper(Wrapper[EnvType]):
    """Base of wrappers without influence on the agent, such as recorders: copies for planning leave them out."""

    keeps_observations_and_actions = True


def _new_instance(wrapper_type: type[Wrapper[Any]]) -> Wrapper[Any]:
    return wrapper_type.__new__(wrapper_type)


class ObservationWrapper(Wrapper[EnvType], ABC):
    """Convert the observations of an environment."""

    @override(Wrapper)
    def reset(self, **kwargs: Any) -> Any:
        if self._is_gymnasium:
            observation, info = self._env_reset(**kwargs)
            return self.observation(observation), info
        return self.observation(self._env_reset(**kwargs))

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        observation, *rest = self._env_step(action)
        return self.observation(observation), *rest

    @abstractmethod
    def observation(self, observation: Any) -> Any:
        """Convert an observation of the wrapped environment to that of the agent.

        :meth:`reset` and :meth:`step` call it; recorded observations are converted by :meth:`substep_observation`.

        :param observation: Observation of the wrapped environment.
        """

    @override(Wrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        env: Any = self.env
        observations, actions = env.get_observation_and_action_dicts(maze_state, maze_action, first_step_in_episode)
        if observations is not None:
            observations = {
                key: self.substep_observation(observation, key) for key, observation in observations.items()
            }
        return observations, actions

    def substep_observation(self, observation: Any, step_key: StepKeyType) -> Any:
        """Convert a recorded observation of the wrapped environment, which is not modified.

        Default: :meth:`observation`, independent of the sub-step.

        :param observation: The observation.
        :param step_key: The sub-step that it belongs to.
        """
        return self.observation(observation)


class ActionWrapper(Wrapper[EnvType], ABC):
    """Convert the actions of the agent."""

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        return self._env_step(self.action(action))

    @abstractmethod
    def action(self, action: Any) -> Any:
        """Convert an action of the agent to one of the wrapped environment, before each step.

        :param action: Action of the agent.
        """

    @abstractmethod
    def reverse_action(self, action: Any) -> Any:
        """Convert an action of the wrapped environment to the agent's; inverse of :meth:`action`.

        Only the conversion of recorded episodes (:meth:`get_observation_and_action_dicts`) calls it.

        :param action: Action of the wrapped environment.
        """

    @override(Wrapper)
    def get_observation_and_action_dicts(
        self, maze_state: MazeStateType | None, maze_action: MazeActionType | None, first_step_in_episode: bool
    ) -> ObservationsAndActions:
        env: Any = self.env
        observations, actions = env.get_observation_and_action_dicts(maze_state, maze_action, first_step_in_episode)
        if actions is not None:
            actions = {key: self.reverse_action(action) for key, action in actions.items()}
        return observations, actions


class RewardWrapper(Wrapper[EnvType], ABC):
    """Convert the rewards of an environment."""

    keeps_observations_and_actions = True

    CLONED: ClassVar[tuple[str, ...]] = ("_rewards", "_is_step_over")

    # Original and converted reward of each sub-step of the latest environment step.
    _rewards: tuple[tuple[Any, Any], ...] = ()
    _is_step_over = True

    @override(Wrapper)
    def reset(self, *args: Any, **kwargs: Any) -> Any:
        self._is_step_over = True
        return self._env_reset(*args, **kwargs)

    @override(Wrapper)
    def step(self, action: Any) -> Any:
        context = self._context
        if context is not None:
            context.pre_step()  # a wrapper may answer a sub-step without stepping the environment
        observation, original, *rest = self._env_step(action)
        reward = self.reward(original)
        self._rewards = (*(() if self._is_step_over else self._rewards), (original, reward))
        self._is_step_over = context is None or context.is_step_complete
        return observation, reward, *rest

    @abstractmethod
    def reward(self, reward: Any) -> Any:
        """Convert a reward of the wrapped environment to that of the agent.

        :param reward: Reward of one (sub-)step.
        """

    def get_actor_rewards(self) -> np.ndarray | None:
        """Return the actors' shares of the converted reward of the environment step.

        Where each actor's share is the reward of its sub-step, these are the converted rewards of the sub-steps;
        otherwise shares keep their original proportions.

        :return: `[n_actors]`; `None`: there are no shares.
        """
        get_inner = getattr(self.env, "get_actor_rewards", None)
        shares = None if get_inner is None else get_inner()
        if shares is None:
            return None
        shares = np.asarray(shares, dtype=np.float64)
        originals, converted = np.array(self._rewards or [(0.0, 0.0)], np.float64).T
        if shares.shape == originals.shape and np.allclose(shares, originals):
            return converted  # type: ignore[no-any-return]
        original, reward = originals.sum(), converted.sum()
        if original == 0:
            # Without a proportion, each actor gets an equal part of the converted reward.
            return shares + reward / len(shares)  # type: ignore[no-any-return]
        return shares * (reward / original)  # type: ignore[no-any-return]


# -- entries of dictionary spaces, by sub-step -----------------------------------------------------------------------

_MASK_NAME = re.compile(r"(.*_)?mask(-.*)?")

Observation = dict[str, Any]
Action = dict[str, Any]


def is_mask(name: str) -> bool:
    """Return whether an observation is an action mask, by its name: `mask` or `..._mask`, pre-processed or not."""
    return _MASK_NAME.fullmatch(name) is not None


class SpacesWrapper(Wrapper[EnvType]):
    """Base class of wrappers that have spaces of their own, by sub-step key."""

    @property
    def action_space(self) -> Any:
        """Action space of the actor that acts next."""
        return self._of_next_actor(self.action_spaces_dict)

    @property
    def observation_space(self) -> Any:
        """Observation space of the actor that acts next."""
        return self._of_next_actor(self.observation_spaces_dict)

    def _of_next_actor(self, by_step_key: Mapping[StepKeyType, T]) -> T:
        return next(iter(by_step_key.values())) if len(by_step_key) == 1 else by_step_key[self.actor_id().step_key]


class SubstepObservationWrapper(ObservationWrapper["MazeEnv[Any]"], SpacesWrapper["MazeEnv[Any]"], ABC):
    """Base class of wrappers whose conversion depends on the sub-step of the observation.

    :param env: The environment to wrap.
    """

    observation_spaces_dict: dict[StepKeyType, gymnasium.spaces.Dict]
    """The converted spaces by sub-step key, which subclasses set."""

    def __init__(self, env: MazeEnv[Any]) -> None:
        super().__init__(env)
        step_keys = list(env.observation_spaces_dict)
        self._only_step_key = step_keys[0] if len(step_keys) == 1 else None

    @override(ObservationWrapper)
    def step(self, action: Any) -> Any:
        observation, reward, done, info = self._env_step(action)
        return self.observation(observation), reward, done, info

    @override(ObservationWrapper)
    def observation(self, observation: Observation) -> Any:
        step_key = self._only_step_key
        return self.substep_observation(observation, self.env.actor_id().step_key if step_key is None else step_key)


class SubstepActionWrapper(ActionWrapper["MazeEnv[Any]"], SpacesWrapper["MazeEnv[Any]"], ABC):
    """Base class of wrappers that replace entries of the action spaces.

    :param env: The environment to wrap.
    """

    action_spaces_dict: dict[StepKeyType, gymnasium.spaces.Dict]
    """The spaces of the agent's actions by sub-step key, which subclasses set."""

    def seed(self, seed: Any) -> None:
        """Seed the environment and the action spaces of this wrapper.

        :param seed: Seed of the environment; the spaces are seeded if it is an integer or `None` (random).
        """
        self.env.seed(seed)
        if seed is None or isinstance(seed, (int, np.integer)):
            for space in self.action_spaces_dict.values():
                space.seed(None if seed is None else int(seed))


def known_spaces(
    step_spaces: Mapping[StepKeyType, Mapping[str, gymnasium.spaces.Space[Any]]], name: str, where: str, kind: str
) -> dict[StepKeyType, gymnasium.spaces.Space[Any]]:
    """Return the spaces of the entries with a name, by the key of the sub-steps that have one.

    :param step_spaces: Spaces by sub-step key and name.
    :param name: Name in the configuration.
    :param where: Key of the configuration, for the message.
    :param kind: `observation` or `action`, for the message.
    :raises ConfigError: No sub-step has such an entry.
    """
    # `in` of a space is whether it contains a value.
    found = {key: entries[name] for key, entries in step_spaces.items() if name in tuple(entries)}
    if not found:
        known = entry_names(step_spaces)
        raise ConfigValueError(f"{where}: there is no {kind} `{name}`.{did_you_mean(name, known)} Known: {known}.")
    return found


def entry_names(step_spaces: Mapping[StepKeyType, Mapping[str, gymnasium.spaces.Space[Any]]]) -> list[str]:
    """Return the names of all sub-steps' entries, each once."""
    return list(dict.fromkeys(name for entries in step_spaces.values() for name in entries))


def checked_entry(
    entry: Any, where: str, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> Mapping[str, Any]:
    """Return an entry of a wrapper's configuration.

    :param entry: The entry.
    :param where: Key of the configuration.
    :param required: Keys that it must have.
    :param optional: Further keys that it may have.
    :raises ConfigError: It is not a mapping, lacks a key, or has an unknown one.
    """
    known = [*required, *optional]
    if not isinstance(entry, Mapping) or any(key not in entry for key in required):
        expected = f"`{'`, `'.join(required)}`" if required else f"keys among {known}"
        raise ConfigValueError(f"{where}: expected a mapping with {expected}, found {entry!r}.")
    for key in entry:
        if key not in known:
            raise ConfigValueError(f"{where}: unknown key `{key}`.{did_you_mean(key, known)} Known: {known}.")
    return entry
