"""What a state-action critic composer is."""

from __future__ import annotations

from abc import abstractmethod

from maze.core.agent.torch_model import TorchModel
from maze.core.annotations import override
from maze.perception.models.critics.critic_composer_interface import CriticComposerInterface


class BaseStateActionCriticComposer(CriticComposerInterface):
    """Builds a state-action critic."""

    @property
    @abstractmethod
    @override(CriticComposerInterface)
    def critic(self) -> TorchModel:
        """The critic (always the same object)."""
