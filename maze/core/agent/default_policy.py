"""Join flat policies to a structured one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maze.core.agent.flat_policy import FlatPolicy
from maze.core.agent.policy import Policy, for_actor
from maze.core.annotations import override
from maze.core.env.structured_env import ActorID
from maze.core.errors import ConfigError
from maze.core.utils.factory import CollectionOfConfigType, Factory


class DefaultPolicy(Policy):
    """Query the flat policy that belongs to the acting sub-step.

    :param policies: Flat policies, or configurations of them, by step key (a list: keys 0, 1, ...).
    :raises ConfigError: There is none.
    """

    def __init__(self, policies: CollectionOfConfigType) -> None:
        factory = Factory(FlatPolicy)  # type: ignore[type-abstract]  # configurations name concrete ones
        self.policies: dict[Any, FlatPolicy] = dict(
            factory.instantiate_collection(policies, config_path="policy.policies")
        )
        if not self.policies:
            raise ConfigError("policy.policies: expected at least one flat policy, found none.")

    @override(Policy)
    def seed(self, seed: int) -> None:
        for index, policy in enumerate(self.policies.values()):
            seed_policy: Any = getattr(policy, "seed", None)
            if seed_policy is not None:
                seed_policy(seed + index)

    @override(Policy)
    def compute_action(
        self,
        observation: Any,
        maze_state: Any = None,
        env: Any = None,
        actor_id: ActorID | None = None,
        deterministic: bool = False,
    ) -> Any:
        return self.policy_for(actor_id).compute_action(observation, deterministic=deterministic)

    def policy_for(self, actor_id: ActorID | None) -> FlatPolicy:
        """Return the flat policy of an actor.

        :param actor_id: The actor, of which the sub-step counts; `None`: the only policy there is.
        :raises ConfigError: There is none for the actor's sub-step, or several and no actor is named.
        """
        return for_actor(self.policies, actor_id, "policy.policies")

    @override(Policy)
    def compute_top_action_candidates(
        self, observation: Any, num_candidates: int | None, maze_state: Any, env: Any, actor_id: ActorID | None = None
    ) -> tuple[Sequence[Any], Sequence[float]]:
        return self.policy_for(actor_id).compute_top_action_candidates(observation, num_candidates)
