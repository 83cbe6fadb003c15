"""What evaluates a policy during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy


class Evaluator(ABC):
    """Evaluates policies."""

    @abstractmethod
    def evaluate(self, policy: TorchPolicy) -> None:
        """Evaluates the policy as it is; results go into statistics and, where there is one, a model selection."""

    def state_dict(self) -> dict[str, Any]:
        """What the next evaluations depend on besides the policy, in numbers and arrays."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Continues from a state that :meth:`state_dict` returned.

        :return: What could not be continued.
        """
        return []
