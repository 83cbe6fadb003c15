"""Critic composers."""

from maze.perception.models.critics.base_state_action_critic_composer import (
    BaseStateActionCriticComposer,
    SharedStateActionCriticComposer,
    StepStateActionCriticComposer,
)
from maze.perception.models.critics.base_state_critic_composer import (
    BaseStateCriticComposer,
    DeltaStateCriticComposer,
    SharedStateCriticComposer,
    StepStateCriticComposer,
)
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface

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
