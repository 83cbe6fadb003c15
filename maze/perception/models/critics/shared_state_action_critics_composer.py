"""The documented path of the composer of shared state-action critics."""

from maze.perception.models.critics.base_state_action_critic_composer import SharedStateActionCriticComposer

__all__ = ["SharedStateActionCriticComposer"]
