"""Policies that act by a bundle in Maze environments: rollouts, comparisons, deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.agent.policy import HiddenStatesByEnvironment, Policy, StatesOfActor
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.serve.bundle import BatchActions, PolicyBundle, seeded_generator
from maze.serve.drift import DriftGuard, DriftLimits
from maze.serve.pipeline import Actor, packed


class BundlePolicy(Policy):
    """Act by the networks of a bundle, in an environment with the wrappers of the training.

    Hidden states of recurrent networks are zero at the beginning of each episode of the environment.

    >>> policy = BundlePolicy("policy.maze")  # doctest: +SKIP
    >>> policy.compute_action(env.reset(), None, None, env.actor_id())  # doctest: +SKIP

    :param bundle: The file, or a bundle.
    :param drift: Limits of the drift of observations.
    """

    def __init__(self, bundle: str | Path | PolicyBundle, drift: DriftLimits | None = None) -> None:
        self.bundle = bundle if isinstance(bundle, PolicyBundle) else PolicyBundle.load(bundle)
        self.drift_guard = DriftGuard(str(self.bundle.card["name"]), self.bundle.drift, drift)
        self.is_recurrent = self.bundle.is_recurrent
        self._rng = seeded_generator(None)
        self._hidden_states = HiddenStatesByEnvironment()

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._rng = seeded_generator(seed)

    @override(Policy)
    def compute_action(
        self,
        observation: Mapping[str, Any],
        maze_state: Any,
        env: Any,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        states = self._hidden_states.now(self, env, actor_id) if self.is_recurrent else None
        answer = self._answer(_batch_of_one(observation), actor_id, states, deterministic=deterministic)
        return answer.row(0)

    def compute_actions(
        self,
        observation: Mapping[str, np.ndarray[Any, Any]],
        actor_id: ActorID | None = None,
        deterministic: bool = False,
        out: dict[str, np.ndarray[Any, Any]] | None = None,
        logits_out: dict[str, np.ndarray[Any, Any]] | None = None,
        states: StatesOfActor | None = None,
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Act for a batch of environments, `[n_envs, ...]`, see
        :meth:`maze.core.agent.torch_policy.TorchPolicy.compute_actions`.
        """
        answer = self._answer(observation, actor_id, states, deterministic=deterministic)
        for target, source in ((out, answer.actions), (logits_out, answer.logits)):
            for head, array in ({} if target is None else source).items():
                np.copyto(target[head], array, casting="unsafe")  # type: ignore[index]  # there is a target
        return answer.actions if out is None else out

    def state_sizes(self, actor_id: ActorID | None) -> dict[str, int]:
        """Return sizes of the hidden states of an actor, by state key; empty where its network carries none."""
        step_key, agent_id = _actor_of(self.bundle, actor_id)
        return dict(self.bundle.step(step_key).network(agent_id).state_sizes)

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: Mapping[str, Any],
        num_candidates: int | None,
        maze_state: Any,
        env: Any,
        actor_id: ActorID | None = None,
    ) -> tuple[Sequence[dict[str, Any]], Sequence[float]]:
        n_ranked = 2**31 if num_candidates is None else num_candidates
        states = self._hidden_states.now(self, env, actor_id) if self.is_recurrent else None
        answer = self._answer(_batch_of_one(observation), actor_id, states, deterministic=True, ranked=n_ranked)
        actions, probabilities = zip(*answer.ranked[0], strict=True)
        return list(actions), list(probabilities)

    def _answer(
        self,
        batch: Mapping[str, np.ndarray[Any, Any]],
        actor_id: ActorID | None,
        states: StatesOfActor | None,
        deterministic: bool,
        ranked: int = 0,
    ) -> BatchActions:
        """Act on a batch; hidden states `[n_rows, size]` are overwritten by the next ones."""
        step_key, agent_id = _actor_of(self.bundle, actor_id)
        rng = None if deterministic else self._rng
        answer = self.bundle.act_batch(
            step_key, batch, agent_id=agent_id, deterministic=deterministic, rngs=rng, ranked=ranked, states=states
        )
        for key, array in answer.states.items():
            assert states is not None, "a recurrent bundle requires them"
            states[key][...] = array
        return answer


def _actor_of(bundle: PolicyBundle, actor_id: Actor | None) -> Actor:
    return (next(iter(bundle.steps)), 0) if actor_id is None else actor_id


class WholeBundlePolicy(Policy):
    """Act by a bundle with its wrappers, as it is served, in an environment without them.

    An episode begins when the policy is seeded, as comparisons do before each.

    :param bundle: The file, or a bundle.
    :raises ConfigError: The bundle requires code of the caller.
    """

    def __init__(self, bundle: str | Path | PolicyBundle) -> None:
        self.bundle = bundle if isinstance(bundle, PolicyBundle) else PolicyBundle.load(bundle)
        if missing := [str(piece["class"]) for piece in self.bundle.card["code"] if piece["is_required"]]:
            name = self.bundle.card["name"]
            raise ConfigError(f"The bundle {name!r} requires the code of {', '.join(missing)}. Use its run.")
        self._session = self.bundle.session()

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._session.reset(seed)

    @override(Policy)
    def compute_action(
        self,
        observation: Mapping[str, Any],
        maze_state: Any,
        env: Any,
        actor_id: Actor | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        actor = _actor_of(self.bundle, actor_id)
        step = self.bundle.step(actor[0])
        entries = packed({name: observation[name] for name in step.observation_space}, step.observation_kind)
        action: dict[str, Any] = self._session.act(entries, actor, deterministic=deterministic, is_packed=False)
        return action

    def require_same(self, env: Any, origin: str) -> None:
        """Raise an error if the bundle cannot act in an environment.

        :param env: The environment.
        :param origin: Origin of the bundle in messages.
        """
        wanted = {
            key: {name: tuple(space["shape"]) for name, space in step.observation_space.items()}
            for key, step in self.bundle.steps.items()
        }
        shown = {
            key: {name: tuple(space.shape) for name, space in spaces.spaces.items()}
            for key, spaces in env.observation_spaces_dict.items()
        }
        if any(not wanted[key].items() <= shown.get(key, {}).items() for key in wanted):
            card = self.bundle.card
            raise ConfigError(
                f"{origin}: the bundle {card['name']!r} was trained in {card['environment']}, with the observations "
                f"{wanted} by sub-step; this environment, without wrappers that the bundle contains, has {shown}."
            )


def _batch_of_one(observation: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value)[np.newaxis] for name, value in observation.items()}
