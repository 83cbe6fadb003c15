"""The documented path of the composer of shared state critics."""

from maze.perception.models.critics.base_state_critic_composer import SharedStateCriticComposer

__all__ = ["SharedStateCriticComposer"]
