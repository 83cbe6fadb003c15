"""The documented path of the composer of step state critics."""

from maze.perception.models.critics.base_state_critic_composer import StepStateCriticComposer

__all__ = ["StepStateCriticComposer"]
