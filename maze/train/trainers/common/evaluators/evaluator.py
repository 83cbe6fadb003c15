"""What evaluates a policy during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class Evaluator(ABC):
    """Evaluates policies."""

    @abstractmethod
    def evaluate(self, policy: TorchPolicy) -> None:
        """Evaluates the policy as it is; results go into statistics and, where there is one, a model selection."""
