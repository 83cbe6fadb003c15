"""Critic composers."""

from maze.perception.models.critics.base_state_action_critic_composer import BaseStateActionCriticComposer
from maze.perception.models.critics.base_state_critic_composer import BaseStateCriticComposer
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface
from maze.perception.models.critics.delta_state_critic_composer import DeltaStateCriticComposer
from maze.perception.models.critics.shared_state_action_critics_composer import SharedStateActionCriticComposer
from maze.perception.models.critics.shared_state_critic_composer import SharedStateCriticComposer
from maze.perception.models.critics.step_state_action_critic_composer import StepStateActionCriticComposer
from maze.perception.models.critics.step_state_critic_composer import StepStateCriticComposer

StateCriticComposer = StepStateCriticComposer
"""Short for the critic with a network for each sub-step."""
StateActionCriticComposer = StepStateActionCriticComposer
"""Short for the critic with a network for each sub-step."""

__all__ = [
    "BaseStateActionCriticComposer",
    "BaseStateCriticComposer",
    "CriticComposerInterface",
    "DeltaStateCriticComposer",
    "SharedStateActionCriticComposer",
    "SharedStateCriticComposer",
    "StateActionCriticComposer",
    "StateCriticComposer",
    "StepStateActionCriticComposer",
    "StepStateCriticComposer",
]
