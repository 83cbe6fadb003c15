"""A bundle in Maze's own environments: rollouts, comparisons, deployments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maze.core.agent.policy import Policy
from maze.core.annotations import override
from maze.core.errors import ConfigError
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
        step_key, agent_id = _actor_of(self.bundle, actor_id)
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
        step_key, agent_id = _actor_of(self.bundle, actor_id)
        n_ranked = 2**31 if num_candidates is None else num_candidates
        answer = self.bundle.act_batch(step_key, _batch_of_one(observation), agent_id=agent_id, ranked=n_ranked)
        actions, probabilities = zip(*answer.ranked[0], strict=True)
        return list(actions), list(probabilities)


def _actor_of(bundle: PolicyBundle, actor_id: Actor | None) -> Actor:
    return (next(iter(bundle.steps)), 0) if actor_id is None else actor_id


class WholeBundlePolicy(Policy):
    """Acts by all that a bundle holds, its wrappers included, in an environment without them: as it is served.

    An episode begins where the policy is seeded, as comparisons do before each.

    :param bundle: The file, or a bundle.
    :raises ConfigError: The bundle needs code that it cannot hold.
    """

    def __init__(self, bundle: str | Path | PolicyBundle) -> None:
        self.bundle = bundle if isinstance(bundle, PolicyBundle) else PolicyBundle.load(bundle)
        if missing := [str(piece["class"]) for piece in self.bundle.card["code"] if piece["is_required"]]:
            raise ConfigError(
                f"The bundle {self.bundle.card['name']!r} cannot act by itself: it was trained with "
                f"{', '.join(missing)}, code that no bundle holds. Take the run that it was made of in its place."
            )
        self.spaces = _RawSpaces(self.bundle)
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
        session = self._session
        actor = _actor_of(self.bundle, actor_id)
        step = self.bundle.step(actor[0])
        entries = {name: observation[name] for name in step.observation_space}
        shown: Any = entries
        if step.observation_kind in ("single", "tuple"):
            shown = tuple(entries.values()) if step.observation_kind == "tuple" else next(iter(entries.values()))
        inputs = session.prepare(shown, actor)
        chosen = None
        if inputs is not None:
            rng = None if deterministic else session.rng
            chosen = self.bundle.act_batch(
                actor[0], _batch_of_one(inputs), agent_id=actor[1], deterministic=deterministic, rngs=rng
            ).row(0)
        action: dict[str, Any] = session.finish(chosen, is_packed=False)
        return action


class _RawSpaces:
    """What a bundle's environment shows, to be compared with what there is."""

    def __init__(self, bundle: PolicyBundle) -> None:
        self._bundle = bundle

    def require_same(self, env: Any, origin: str) -> None:
        """Raises an error where a bundle cannot act.

        :param env: The environment.
        :param origin: Where the bundle comes from.
        """
        wanted = {
            key: {name: tuple(space["shape"]) for name, space in step.observation_space.items()}
            for key, step in self._bundle.steps.items()
        }
        shown = {
            key: {name: tuple(space.shape) for name, space in spaces.spaces.items()}
            for key, spaces in env.observation_spaces_dict.items()
        }
        if any(not wanted[key].items() <= shown.get(key, {}).items() for key in wanted):
            raise ConfigError(
                f"{origin}: the bundle {self._bundle.card['name']!r} was made for {self._bundle.card['environment']}, "
                f"which shows {wanted} by sub-step; this environment shows {shown}. Name the bundle's environment, and "
                "only such wrappers as the bundle does not hold (it brings those of observations and actions)."
            )


def _batch_of_one(observation: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(value)[np.newaxis] for name, value in observation.items()}
