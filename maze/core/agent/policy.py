"""Interface of policies."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from maze.core.errors import ConfigError, unknown_key_error
from maze.core.utils.factory import TARGET_KEY, ConfigType, Factory, locate, plain_container

if TYPE_CHECKING:
    from maze.core.env.base_env import BaseEnv
    from maze.core.env.maze_env import ActionType
    from maze.core.env.maze_state import MazeStateType
    from maze.core.env.observation_conversion import ObservationType
    from maze.core.env.structured_env import ActorID

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
        """

    def needs_state(self) -> bool:
        """Return whether `compute_action` needs `maze_state` (building it may copy the state of the simulator)."""
        return False

    def needs_env(self) -> bool:
        """Return whether `compute_action` needs `env`, e.g. to plan with a clone."""
        return False

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
        """

    def compute_top_action_candidates(
        self,
        observation: ObservationType,
        num_candidates: int | None,
        maze_state: MazeStateType | None,
        env: BaseEnv | None,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[ActionType], Sequence[float]]:
        """Rank actions, best first. Policies that do not rank give the one action that they take.

        :param num_candidates: How many at most; `None`: as many as there are.
        :return: The actions, and their probabilities or scores.
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
    """Return the entry that belongs to the sub-step of an actor (`None`: the only entry there is).

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


SPACES = ("action_spaces_dict", "observation_spaces_dict")
"""Arguments of policies that take the spaces of the environment."""


def build_policy(config: ConfigType, spaces: Mapping[str, Any], where: str = "policy") -> Policy:
    """Build a policy; constructor arguments that are spaces, as of the random policy, are the environment's.

    :param config: The policy, or its configuration.
    :param spaces: The spaces of the environment, by the names in :data:`SPACES`.
    :param where: Place in the configuration, for messages.
    """
    plain = plain_container(config, where)
    taken: dict[str, Any] = {}
    if isinstance(plain, Mapping) and TARGET_KEY in plain:
        parameters = inspect.signature(locate(plain[TARGET_KEY], where)).parameters
        taken = {name: value for name, value in spaces.items() if name in parameters}
    return Factory(Policy).instantiate(plain, config_path=where, **taken)  # type: ignore[type-abstract]
