"""The documented path of the composer of step state-action critics."""

from maze.perception.models.critics.base_state_action_critic_composer import StepStateActionCriticComposer

__all__ = ["StepStateActionCriticComposer"]
