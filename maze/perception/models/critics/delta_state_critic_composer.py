"""The documented path of the composer of delta state critics."""

from maze.perception.models.critics.base_state_critic_composer import DeltaStateCriticComposer

__all__ = ["DeltaStateCriticComposer"]
