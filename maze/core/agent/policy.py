"""Interface of policies, and hidden states of recurrent ones, from step to step of the environments."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory, locate, plain_container

if TYPE_CHECKING:
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.environment_context import EnvironmentContext
    from maze.core.env.maze_env import ActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType

T = TypeVar("T")


class Policy(ABC):
    """Choose the actions of all actors of a structured environment.

    Observations and actions are those of one environment: dictionaries of arrays without a batch dimension.
    A policy draws from generators of its own, which :meth:`seed` sets, and never from a global one.
    """

    is_recurrent: bool = False
    """Whether it carries hidden states from step to step, and therefore needs `env`."""

    def seed(self, seed: int) -> None:
        """Restart the policy's generators: the same seed and observations give the same actions.

        Default: nothing, for policies that draw nothing.

        :param seed: A non-negative integer.
        """

    def needs_state(self) -> bool:
        """Return whether `compute_action` needs `maze_state` (building it may copy the state of the simulator)."""
        return False

    def needs_env(self) -> bool:
        """Return whether `compute_action` needs `env`, e.g. to plan with a clone. Default: of recurrent ones."""
        return self.is_recurrent

    def bind(self, env: Any) -> None:
        """Prepare for acting in an environment, before its first episode. Default: nothing.

        :param env: The environment with its wrappers; it is left as it is.
        :raises ConfigError: The policy cannot act in it.
        """

    @abstractmethod
    def compute_action(
        self,
        observation: ObservationType,
        maze_state: MazeStateType | None,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> ActionType:
        """Choose one action.

        :param observation: Observation of the acting actor.
        :param maze_state: State of the simulator, if :meth:`needs_state`.
        :param env: The environment itself, if :meth:`needs_env`.
        :param actor_id: The acting actor; optional where there is only one policy.
        :param deterministic: Return the deterministic (greedy) action instead of sampling.
        :return: The action, `[*space.shape]` by action head.
        """

    def compute_top_action_candidates(
        self,
        observation: ObservationType,
        num_candidates: int | None,
        maze_state: MazeStateType | None,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        """Rank actions, best first. The default is the deterministic action alone, with probability 1.

        :param observation: Observation of the acting actor.
        :param num_candidates: Maximum number of actions, at least 1; `None`: all.
        :param maze_state: State of the simulator, if :meth:`needs_state`.
        :param env: The environment itself, if :meth:`needs_env`.
        :param actor_id: The acting actor; optional where there is only one policy.
        :return: The actions, and their probabilities or scores.
        :raises ConfigError: The policy cannot rank its actions, such as a torch policy with a continuous action head.
        """
        return [self.compute_action(observation, maze_state, env, actor_id, deterministic=True)], [1.0]


def acting_in(
    env: Any, policy: Policy, deterministic: bool = False
) -> Callable[[ObservationType, ActorID], ActionType]:
    """Return a function of observation and actor that has a policy choose an action.

    :param env: The environment, for policies that need it or its state.
    :param policy: The policy.
    :param deterministic: Return deterministic (greedy) actions instead of sampling.
    """
    needs_state, needs_env = policy.needs_state(), policy.needs_env()

    def act(observation: ObservationType, actor_id: ActorID) -> ActionType:
        return policy.compute_action(
            observation,
            maze_state=env.get_maze_state() if needs_state else None,
            env=env if needs_env else None,
            actor_id=actor_id,
            deterministic=deterministic,
        )

    return act


def for_actor(by_step_key: Mapping[Any, T], actor_id: ActorID | None, where: str) -> T:
    """Return the entry of the sub-step of an actor.

    :param by_step_key: Entries by step key.
    :param actor_id: The actor; `None`: the only entry.
    :param where: Place of the entries in the configuration.
    :raises ConfigError: There is none for the actor's sub-step, or several and no actor is named.
    """
    if actor_id is None:
        if len(by_step_key) > 1:
            raise ConfigError(f"{where}: there are entries for {list(by_step_key)}; name one with `actor_id`.")
        return next(iter(by_step_key.values()))
    if actor_id[0] not in by_step_key:
        raise unknown_key_error(f"{where}: step key", actor_id[0], by_step_key)
    return by_step_key[actor_id[0]]


# Arguments of policies that take the spaces of the environment.
_SPACES = ("action_spaces_dict", "observation_spaces_dict")


def build_policy(config: ConfigType, env: Any = None, where: str = "policy", **spaces: Any) -> Policy:
    """Build a policy; constructor arguments that are spaces, as of the random policy, are the environment's.

    :param config: The policy, or its configuration.
    :param env: The environment, or another object with its spaces as attributes; `None`: only `spaces` are known.
    :param where: Place in the configuration, for messages.
    :param spaces: Spaces by the names of the arguments, `action_spaces_dict` and `observation_spaces_dict`.
    """
    plain = plain_container(config, where)
    taken: dict[str, Any] = {}
    if isinstance(plain, Mapping) and TARGET_KEY in plain:
        parameters = inspect.signature(locate(plain[TARGET_KEY], where)).parameters
        given = spaces if env is None else {name: getattr(env, name) for name in _SPACES}
        taken = {name: value for name, value in given.items() if name in parameters}
    return Factory(Policy).instantiate(plain, config_path=where, **taken)  # type: ignore[type-abstract]


# -- hidden states ----------------------------------------------------------------------------------------------------

StateSizes = Callable[["ActorID | None"], Mapping[str, int]]
"""Sizes of the hidden states of an actor's network, by state key."""
StatesOfActor = dict[str, np.ndarray]
"""Hidden states `[n_envs, size]` by state key."""
# By actor: step of the simulation of its latest evaluation, and its states before it.
_Evaluations = dict["ActorID | None", tuple[int, StatesOfActor]]


class HiddenStates:
    """Hidden states of each actor in each of several environments; zero where an episode begins.

    :param n_envs: Number of environments.
    :param sizes: Returns the sizes of the hidden states of an actor.
    """

    def __init__(self, n_envs: int, sizes: StateSizes) -> None:
        self.n_envs = n_envs
        self._sizes = sizes
        self._by_actor: dict[ActorID | None, StatesOfActor] = {}

    def of(self, actor: ActorID | None) -> StatesOfActor:
        """Return the states of an actor, to be read and overwritten.

        :param actor: The actor; `None`: the only one there is.
        :return: float32 `[n_envs, size]` by state key, zero at first; empty where the actor's network carries none. The
            arrays are those that this object keeps.
        """
        if actor not in self._by_actor:
            sizes = self._sizes(actor).items()
            self._by_actor[actor] = {key: np.zeros((self.n_envs, size), np.float32) for key, size in sizes}
        return self._by_actor[actor]

    def reset(self, envs: np.ndarray) -> None:
        """Set the hidden states of some environments to zero.

        :param envs: Mask of these environments, bool `[n_envs]`.
        """
        if envs.any():
            for states in self._by_actor.values():
                for array in states.values():
                    array[envs] = 0.0

    def copied(self) -> dict[ActorID | None, StatesOfActor]:
        """Return copies of the current states, by actor."""
        return {actor: {key: array.copy() for key, array in of.items()} for actor, of in self._by_actor.items()}

    def act(
        self, env: Any, actor: ActorID, env_indices: Sequence[int] | None, choose: Callable[[StatesOfActor], None]
    ) -> None:
        """Compute actions in a vector environment; hidden states are zero where an episode begins.

        :param env: The vector environment, as its latest step has left it.
        :param actor: The acting actor.
        :param env_indices: Indices of the environments; `None`: all.
        :param choose: Reads the states of these environments, `[n_chosen, size]`, and overwrites them.
        """
        ended = env.terminated | env.truncated
        states = self.of(actor)
        if env_indices is None:
            self.reset(ended)
            choose(states)
            if env.autoreset_pending is not None:  # placeholders are not observations of the next episode
                paused = np.zeros_like(ended)
                paused[env.autoreset_pending] = True
                self.reset(paused)
            return
        acting = np.zeros_like(ended)
        acting[env_indices] = True
        self.reset(ended & acting)
        chosen = {key: array[env_indices] for key, array in states.items()}
        choose(chosen)
        for key, array in chosen.items():
            states[key][env_indices] = array

    def state_dict(self) -> dict[str, Any]:
        """Return the states in arrays and plain values."""
        return {"actors": [[None if actor is None else tuple(actor), of] for actor, of in self.copied().items()]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore states of :meth:`state_dict`; current states are dropped.

        :param state_dict: The states, which are copied. Those of another number of environments or another size are
            ignored, so that they are zero.
        """
        self._by_actor.clear()
        for actor, saved in state_dict["actors"]:
            states = self.of(None if actor is None else ActorID(*actor))
            for key, array in states.items():
                if key in saved and saved[key].shape == array.shape:
                    array[...] = saved[key]


class HiddenStatesByEnvironment:
    """Hidden states of a policy by environment, where the policy manages them itself."""

    def __init__(self) -> None:
        self.by_context = WeakKeyDictionary["EnvironmentContext", tuple[int, HiddenStates, _Evaluations]]()
        """Number of the episode, its hidden states, and the latest evaluations of its actors."""

    def now(self, policy: Any, env: Any, actor: ActorID | None) -> StatesOfActor:
        """Return the states to act with in an environment, `[1, size]` by state key; those that follow overwrite them.

        A policy that is evaluated again before the environment is stepped starts from the same states.

        :param policy: The policy: the same at each call.
        :param env: The environment.
        :param actor: The acting actor.
        :raises ConfigError: There is no environment.
        """
        context = getattr(env, "context", None)
        if context is None:
            raise ConfigError(
                f"{type(policy).__name__} is recurrent: it carries hidden states from step to step of an episode. "
                "Pass the environment as `env` after its reset."
            )
        known = self.by_context.get(context)
        if known is None or known[0] != context.n_episodes:
            known = self.by_context[context] = context.n_episodes, HiddenStates(1, policy.state_sizes), {}
        _, hidden_states, evaluations = known
        states = hidden_states.of(actor)
        evaluated_at, before = evaluations.get(actor, (-1, {}))
        if evaluated_at == context.n_substeps:
            for key, array in before.items():
                states[key][...] = array
        else:
            evaluations[actor] = context.n_substeps, {key: array.copy() for key, array in states.items()}
        return states
