"""A bundle in Maze's own environments: rollouts, comparisons, deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.serve.bundle import PolicyBundle
from maze.serve.drift_guard import DriftGuard, DriftLimits
from maze.serve.pipeline import Actor
from maze.serve.session import seeded_generator


class BundlePolicy(Policy):
    """Acts by the networks of a bundle on what an environment with the wrappers of the training shows.

    >>> policy = BundlePolicy("policy.maze")  # doctest: +SKIP
    >>> policy.compute_action(env.reset(), None, None, env.actor_id())  # doctest: +SKIP

    :param bundle: The file, or a bundle.
    :param drift: When observations count as others than those of the training.
    """

    def __init__(self, bundle: str | Path | PolicyBundle, drift: DriftLimits | None = None) -> None:
        self.bundle = bundle if isinstance(bundle, PolicyBundle) else PolicyBundle.load(bundle)
        self.drift_guard = DriftGuard(str(self.bundle.card["name"]), self.bundle.drift, drift)
        self._rng = seeded_generator(None)

    @override(Policy)
    def seed(self, seed: int) -> None:
        self._rng = seeded_generator(seed)

    @override(Policy)
    def compute_action(
        self,
        observation: Mapping[str, Any],
        maze_state: Any,
        env: Any,
        actor_id: Actor | None = None,
        deterministic: bool = False,
    ) -> dict[str, Any]:
        step_key, agent_id = self._actor(actor_id)
        batch = _batch_of_one(observation)
        answer = self.bundle.act_batch(
            step_key, batch, agent_id=agent_id, deterministic=deterministic, rngs=None if deterministic else self._rng
        )
        return answer.row(0)

    @override(Policy)
    def compute_top_action_candidates(
        self,
        observation: Mapping[str, Any],
        num_candidates: int | None,
        maze_state: Any,
        env: Any,
        actor_id: Actor | None = None,
    ) -> tuple[Sequence[dict[str, Any]], Sequence[float]]:
        step_key, agent_id = self._actor(actor_id)
        n_ranked = 2**31 if num_candidates is None else num_candidates
        answer = self.bundle.act_batch(step_key, _batch_of_one(observation), agent_id=agent_id, ranked=n_ranked)
        actions, probabilities = zip(*answer.ranked[0], strict=True)
        return list(actions), list(probabilities)

    def _actor(self, actor_id: Actor | None) -> Actor:
        return (next(iter(self.bundle.steps)), 0) if actor_id is None else actor_id


def _batch_of_one(observation: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value)[np.newaxis] for name, value in observation.items()}
