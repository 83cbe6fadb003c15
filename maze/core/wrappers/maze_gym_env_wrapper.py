"""Gymnasium environments as Maze environments, with conversions of their observations and actions."""

from __future__ import annotations

import copy
import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.utils import EzPickle

from maze.core.annotations import override
from maze.core.env.action_conversion import ActionConversionInterface
from maze.core.env.base_env import TRUNCATION_KEY, reset_values
from maze.core.env.batched_core_env import BatchedCoreEnv
from maze.core.env.core_env import CoreEnv
from maze.core.env.maze_action import MazeActionType
from maze.core.env.maze_env import MazeEnv
from maze.core.env.maze_state import MazeStateType
from maze.core.env.observation_conversion import ObservationConversionInterface
from maze.core.env.render_env_mixin import RenderEnvMixin
from maze.core.env.space_values import action_leaves, observation_leaves, packed, unpacked
from maze.core.errors import ConfigError, EnvironmentContractError
from maze.core.log_events.step_event_log import StepEventLog
from maze.core.rendering.renderer import Renderer, draw_current_state, show_pixels
from maze.core.wrappers import gym_adapters


class GymMazeEnv(MazeEnv["GymCoreEnv"], RenderEnvMixin):
    """A gymnasium environment as a Maze environment with dictionary spaces.

    A single space becomes `{"observation": ...}` and `{"action": ...}`, a Tuple `observation_0`, `action_0` and
    so on, a Dict keeps its keys; those of nested containers are joined by `_`. Sequences become arrays with masks,
    texts are left out (see :class:`~maze.core.wrappers.gym_adapters.ArrayObservations`). Discrete actions
    are counted from zero. Boxes of float64 become float32. A mask of valid actions that the environment gives in
    `info["action_mask"]`, or by a method `action_masks`, becomes the observation `action_mask`.

    >>> env = GymMazeEnv("CartPole-v1")
    >>> env.seed(1)
    >>> sorted(env.reset())
    ['observation']
    >>> observation, reward, done, info = env.step({"action": 0})
    >>> reward, done
    (1.0, False)

    :param env: Id of a registered environment, an environment (current or older API), or its class or a function that
        makes it.
    :param action_mask: Whether to add the mask, see :func:`~maze.core.wrappers.gym_adapters.with_action_mask`.
    :param kwargs: Arguments of the environment, unless it exists.
    :raises ConfigError: It is not an environment, arguments are given for an existing one, or the required mask is
        missing.
    """

    def __init__(
        self,
        env: str | gymnasium.Env[Any, Any] | Callable[..., gymnasium.Env[Any, Any]],
        action_mask: bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(env, str):
            env = gym_adapters.make_gymnasium_env(env, **kwargs)
        elif isinstance(env, type) or not hasattr(env, "step"):
            env = gym_adapters.made(env, **kwargs)
        elif kwargs:
            raise ConfigError(f"GymMazeEnv: the environment {env!r} exists, so it takes no arguments {sorted(kwargs)}.")
        gym_env = gym_adapters.adapted(gym_adapters.with_action_mask(env, action_mask))
        super().__init__(
            core_env=GymCoreEnv(gym_env),
            action_conversion_dict={0: GymActionConversion(gym_env)},
            observation_conversion_dict={0: GymObservationConversion(gym_env)},
        )

    @override(RenderEnvMixin)
    def render(self, mode: str = "human") -> None:
        """Draw the current state in the render mode of the environment."""
        draw_current_state(self)

    def batch(self, n_envs: int) -> BatchedCoreEnv:
        """Return the registered vector environment, see
        :func:`~maze.core.wrappers.gym_vector_env.batch_of_registered`.

        :param n_envs: Number of environments.
        """
        from maze.core.wrappers.gym_vector_env import batch_of_registered

        core_env: GymCoreEnv = self.core_env
        return batch_of_registered(core_env.env, n_envs)


def make_gym_maze_env(name: str, kwargs: Mapping[str, Any] | None = None, **further_kwargs: Any) -> GymMazeEnv:
    """Make a Maze environment of a registered gymnasium environment.

    :param name: Id such as `CartPole-v1`, or `module:id`. If the id is unknown, installed packages that register
        environments are imported.
    :param kwargs: Arguments of the environment.
    :param further_kwargs: Arguments of :func:`adapted_gym_maze_env`, and further ones of the environment, such as
        `render_mode`; `import`: modules to import first.
    :raises ConfigError: There is no such environment, a package is missing, an argument is not taken, or the required
        mask is missing.
    """
    gym_adapters.import_modules(further_kwargs.pop("import", None) or ())
    adaptations = {key: further_kwargs.pop(key) for key in ADAPTATIONS if key in further_kwargs}
    return adapted_gym_maze_env(
        gym_adapters.make_gymnasium_env(name, **{**(kwargs or {}), **further_kwargs}), **adaptations
    )


def adapted_gym_maze_env(
    env: gymnasium.Env[Any, Any],
    gym_wrappers: Sequence[str | Mapping[str, Any]] = (),
    drop: Sequence[str] = (),
    encode: Mapping[str, int] | None = None,
    action_mask: bool | str | None = None,
    reset_options: Mapping[str, Any] | None = None,
    reward_weights: Sequence[float] | None = None,
) -> GymMazeEnv:
    """Make a Maze environment of a gymnasium environment that exists already.

    :param env: The environment.
    :param gym_wrappers: gymnasium's wrappers, the first one innermost: names or paths, or mapped to their arguments.
    :param drop: Observations to leave out.
    :param encode: Number of characters or items to keep of a text or sequence.
    :param action_mask: Whether the mask of valid actions in `info["action_mask"]`, or of a method `action_masks`,
        becomes the observation `action_mask`; `None`: if there is one. A text: the name of the entry of `info`, or of
        the method.
    :param reset_options: Options of every reset of the environment.
    :param reward_weights: Weights of rewards that consist of several numbers.
    """
    env = gym_adapters.gym_wrapped(gym_adapters.in_current_api(env), gym_wrappers)
    if reset_options:
        env = gym_adapters.ResetOptions(env, reset_options)
    if reward_weights:
        env = gym_adapters.WeighedReward(env, reward_weights)
    return GymMazeEnv(
        gym_adapters.adapted(gym_adapters.with_action_mask(env, action_mask), drop, encode), action_mask=False
    )


ADAPTATIONS = tuple(inspect.signature(adapted_gym_maze_env).parameters)[1:]
"""Keys of `env` that adapt a gymnasium environment after it is made."""


def env_name(env: MazeEnv[Any]) -> str:
    """Return the id or class of the wrapped gymnasium or PettingZoo environment, or the class of a Maze environment.

    :param env: A Maze environment without wrappers.
    """
    foreign = getattr(getattr(env.core_env, "simulation", env.core_env), "env", None)  # it may be vectorised
    return type(env).__name__ if foreign is None else gym_adapters.gym_env_name(foreign)


class ForeignCoreEnv(CoreEnv):
    """Base of environments of other frameworks as core environments; their observations are the states.

    :param env: The environment.
    """

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.env = env
        self.renderer = GymRenderer(env)
        self._maze_state: MazeStateType | None = None

    @override(CoreEnv)
    def close(self) -> None:
        self.env.close()

    @override(CoreEnv)
    def get_maze_state(self) -> MazeStateType:
        return self._maze_state

    @override(CoreEnv)
    def get_renderer(self) -> Renderer:
        return self.renderer

    @property
    def can_be_made_again(self) -> bool:
        """Whether the environment was made by an id, a name or a function, not given as an object."""
        return self._maker() is not None

    def set_render_mode(self, render_mode: str) -> None:
        """Make the environment again with another render mode.

        The running episode is lost: call this before `reset`.

        :param render_mode: One of the environment's modes; with the present one, nothing is done.
        :raises ConfigError: The environment was given as an object.
        """
        if getattr(self.env, "render_mode", None) == render_mode:
            return
        if (make := self._maker()) is None:
            raise ConfigError(f"{self!r} was not made by name; make it with render_mode={render_mode!r} yourself.")
        self.env.close()
        self.env = self.renderer.env = make(render_mode=render_mode)

    @abstractmethod
    def _maker(self) -> Callable[..., Any] | None:
        """Return the function that makes the environment with a render mode; `None`: it was given as an object."""


class GymCoreEnv(ForeignCoreEnv):
    """A gymnasium environment as a core environment.

    :param env: Environment with the current API (`reset` returns two values, `step` five) or the older one (one and
        four).
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env)
        self.next_seed: int | None = None
        """The seed of the next reset."""
        self._takes_seed = gym_adapters.takes_seed(env)

    @override(CoreEnv)
    def step(self, maze_action: MazeActionType) -> tuple[MazeStateType, float, bool, dict[Any, Any]]:
        result: Any = self.env.step(maze_action)
        try:
            self._maze_state, reward, done, truncated, info = result
        except (TypeError, ValueError):
            self._maze_state, reward, done, truncated, info = gym_adapters.step_values(self.env, result)
        if truncated and not done:
            done, info = True, {**(info or {}), TRUNCATION_KEY: True}
        elif done and info:
            info.pop(TRUNCATION_KEY, None)
        try:
            reward = reward.item() if isinstance(reward, np.ndarray) and reward.size == 1 else reward
            return self._maze_state, float(reward), bool(done), info
        except TypeError as error:
            raise EnvironmentContractError(
                f"{self!r}: expected a number as the reward, found {reward!r}; see env.reward_weights."
            ) from error

    @override(CoreEnv)
    def reset(self) -> MazeStateType:
        if self.next_seed is None or not self._takes_seed:
            result: Any = self.env.reset()
        else:
            result = self.env.reset(seed=self.next_seed)
        self.next_seed = None
        self._maze_state = reset_values(result)[0]
        return self._maze_state

    @override(CoreEnv)
    def seed(self, seed: int | None) -> None:
        """Seed the next reset; the resets after it continue the sequence."""
        self.next_seed = None if seed is None else int(seed)
        self.env.action_space.seed(self.next_seed)
        if not self._takes_seed and hasattr(self.env, "seed"):
            self.env.seed(self.next_seed)

    @override(CoreEnv)
    def is_step_complete(self) -> bool:
        return True

    @override(ForeignCoreEnv)
    def _maker(self) -> Callable[..., Any] | None:
        spec = getattr(self.env, "spec", None)
        return None if spec is None else functools.partial(gymnasium.make, spec)

    @override(CoreEnv)
    def clone_from(self, env: CoreEnv) -> None:
        assert isinstance(env, GymCoreEnv)
        if restarts_when_copied(env.env):
            raise NotImplementedError(f"{env!r} cannot be cloned: copies of it begin anew (gymnasium.utils.EzPickle).")
        try:
            self.env = self.renderer.env = copy.deepcopy(env.env)
        except Exception as error:
            raise EnvironmentContractError(f"{env!r} cannot be cloned: {error}") from error
        self._maze_state = copy.deepcopy(env.get_maze_state())
        self.next_seed = env.next_seed

    @override(CoreEnv)
    def new_future(self, seed: int) -> None:
        """Replace `np_random`, gymnasium's generator; generators that an environment has beside it stay."""
        self.env.unwrapped.np_random = np.random.default_rng(seed)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({gym_adapters.gym_env_name(self.env)})"


def restarts_when_copied(env: Any) -> bool:
    """Return whether a copy of a simulation is made anew by its constructor, without the state of the episode.

    :param env: A gymnasium environment. Those that are pickled by `gymnasium.utils.EzPickle` are made anew.
    """
    made = type(getattr(env, "unwrapped", env))
    return getattr(made, "__setstate__", None) is EzPickle.__setstate__ and not hasattr(made, "__deepcopy__")


class GymRenderer(Renderer):
    """Draw the current state of a gymnasium environment; earlier states cannot be drawn.

    :param env: Environment made with a render mode; others of gymnasium warn that there is none.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.env = env

    @override(Renderer)
    def render(
        self, maze_state: MazeStateType, maze_action: MazeActionType | None, events: StepEventLog, **kwargs: Any
    ) -> None:
        picture = latest_picture(self.env)
        if isinstance(picture, str):
            print(picture)
        elif isinstance(picture, np.ndarray):
            show_pixels(str(self.env), picture)


def latest_picture(env: Any) -> Any:
    """Let a gymnasium environment draw its state; of several pictures, return the last one."""
    picture = env.render()
    return next(reversed(picture), None) if isinstance(picture, list) else picture


class GymObservationConversion(ObservationConversionInterface):
    """Convert observations of any supported space to a flat dictionary of arrays.

    :param env: The environment whose observations are to be converted.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self.kind, self.leaves = observation_leaves(env.observation_space, gym_adapters.gym_env_name(env))
        self._space = spaces.Dict({key: leaf.space for key, leaf in self.leaves.items()})
        self._cast_only = self.leaves["observation"].cast if self.kind is None else None

    @override(ObservationConversionInterface)
    def maze_to_space(self, maze_state: MazeStateType) -> dict[str, np.ndarray]:
        if self._cast_only is not None:
            return {"observation": self._cast_only(maze_state)}
        return unpacked(self.kind, self.leaves, maze_state)

    @override(ObservationConversionInterface)
    def space_to_maze(self, observation: dict[str, np.ndarray]) -> MazeStateType:
        parts = {key: leaf.to_gym(observation[key]) for key, leaf in self.leaves.items()}
        return packed(self.kind, parts)

    @override(ObservationConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space


class GymActionConversion(ActionConversionInterface):
    """Convert dictionary actions to the type, the offset and the range of the gymnasium space.

    :param env: The environment whose actions are to be converted.
    :param prefix: Prefix of the names of actions.
    """

    uses_state = False

    def __init__(self, env: gymnasium.Env[Any, Any], prefix: str = "") -> None:
        self.kind, self.leaves = action_leaves(env.action_space)
        self.prefix = prefix
        self._space = spaces.Dict({f"{prefix}{key}": leaf.space for key, leaf in self.leaves.items()})
        self._only_leaf = self.leaves["action"] if self.kind is None else None
        self._only_name = f"{prefix}action"

    @override(ActionConversionInterface)
    def space_to_maze(self, action: dict[str, np.ndarray], maze_state: MazeStateType) -> MazeActionType:
        try:
            if self._only_leaf is not None:
                return self._only_leaf.to_gym(action[self._only_name])
            parts = {key: leaf.to_gym(action[f"{self.prefix}{key}"]) for key, leaf in self.leaves.items()}
        except (KeyError, IndexError, TypeError) as error:
            raise EnvironmentContractError(
                f"An action must have the keys {list(self._space)}, element of {self._space}; found {action!r}."
            ) from error
        return packed(self.kind, parts)

    @override(ActionConversionInterface)
    def maze_to_space(self, maze_action: MazeActionType) -> dict[str, np.ndarray]:
        parts = unpacked(self.kind, self.leaves, maze_action)
        return {f"{self.prefix}{key}": value for key, value in parts.items()}

    @override(ActionConversionInterface)
    def space(self) -> spaces.Dict:
        return self._space
