"""Simulations in which always the same actor decides."""

from __future__ import annotations

from maze.core.annotations import override
from maze.core.env.structured_env import ActorID, StepKeyType, StructuredEnv


class SingleActorMixin:
    """The part of a core environment that says who acts; to be named before other bases."""

    @override(StructuredEnv)
    def actor_id(self) -> ActorID:
        return ActorID(0, 0)

    @override(StructuredEnv)
    def is_actor_done(self) -> bool:
        return False

    @property
    @override(StructuredEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return {0: 1}
