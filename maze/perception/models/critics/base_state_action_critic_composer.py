"""What a state-action critic composer is."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from maze.core.annotations import override
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface

if TYPE_CHECKING:
    from maze.core.agent.torch_state_action_critic import TorchStateActionCritic


class BaseStateActionCriticComposer(CriticComposerInterface):
    """Builds a state-action critic."""

    @property
    @abstractmethod
    @override(CriticComposerInterface)
    def critic(self) -> TorchStateActionCritic:
        """The critic (always the same object)."""
