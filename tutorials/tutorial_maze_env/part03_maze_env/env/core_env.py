"""The simulation, with a single actor."""

from __future__ import annotations

from maze.core.annotations import override
from maze.core.env.core_env import CoreEnv
from maze.core.env.structured_env import ActorID, StepKeyType
from tutorial_maze_env.part02_renderer.env.core_env import Cutting2DCoreEnvironment as Part02CoreEnvironment


class Cutting2DCoreEnvironment(Part02CoreEnvironment):
    """The simulation of part 02 that says who acts: always the same actor, which is never done."""

    @override(CoreEnv)
    def is_actor_done(self) -> bool:
        return False

    @override(CoreEnv)
    def actor_id(self) -> ActorID:
        return ActorID(step_key=0, agent_id=0)

    @property
    @override(CoreEnv)
    def agent_counts_dict(self) -> dict[StepKeyType, int]:
        return {0: 1}
