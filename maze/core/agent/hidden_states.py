"""Hidden states of recurrent networks, from step to step of the environments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError

if TYPE_CHECKING:
    from maze.core.env.environment_context import EnvironmentContext

StateSizes = Callable[["ActorID | None"], Mapping[str, int]]
"""How large the states of an actor's network are, by state key."""
StatesOfActor = dict[str, np.ndarray]
"""Hidden states `[n_envs, size]` by state key."""
# By actor: step of the simulation of its latest evaluation, and its states before it.
_Evaluations = dict["ActorID | None", tuple[int, StatesOfActor]]


class HiddenStates:
    """Hidden states of each actor in each of several environments; zero where an episode begins."""

    def __init__(self, n_envs: int, sizes: StateSizes) -> None:
        self.n_envs = n_envs
        self._sizes = sizes
        self._by_actor: dict[ActorID | None, StatesOfActor] = {}

    def of(self, actor: ActorID | None) -> StatesOfActor:
        """Return the states of an actor, to be read and overwritten."""
        states = self._by_actor.get(actor)
        if states is None:
            sizes = self._sizes(actor)
            states = self._by_actor[actor] = {
                key: np.zeros((self.n_envs, size), np.float32) for key, size in sizes.items()
            }
        return states

    def reset(self, envs: np.ndarray) -> None:
        """Set the hidden states of some environments to zero.

        :param envs: Which, bool `[n_envs]`.
        """
        if envs.any():
            for states in self._by_actor.values():
                for array in states.values():
                    array[envs] = 0.0

    def copied(self) -> dict[ActorID | None, StatesOfActor]:
        """Return the states as they are now, by actor."""
        return {actor: {key: array.copy() for key, array in of.items()} for actor, of in self._by_actor.items()}

    def act(
        self,
        env: Any,
        actor: ActorID,
        env_indices: Sequence[int] | None,
        choose: Callable[[StatesOfActor], None],
    ) -> None:
        """Compute actions in a vector environment; hidden states are zero where an episode begins.

        :param env: The vector environment, as its latest step has left it.
        :param actor: The acting actor.
        :param env_indices: In which environments; `None`: in all.
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
        """Restore states of :meth:`state_dict`; states of another number of environments are ignored."""
        self._by_actor.clear()
        for actor, saved in state_dict["actors"]:
            states = self.of(None if actor is None else ActorID(*actor))
            for key, array in states.items():
                if key in saved and saved[key].shape == array.shape:
                    array[...] = saved[key]


class HiddenStatesByEnvironment:
    """Hidden states of a policy by environment, where the policy manages them itself."""

    def __init__(self) -> None:
        self.by_context: WeakKeyDictionary[EnvironmentContext, tuple[int, HiddenStates, _Evaluations]]
        self.by_context = WeakKeyDictionary()
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
