"""Evaluators of policies during training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from maze.core.agent.torch_policy import TorchPolicy
    from maze.train.trainers.common.model_selection.model_selection_base import ModelSelectionBase


class Evaluator(ABC):
    """Evaluate policies."""

    deterministic: bool | None = None
    """Whether actions are deterministic; `None`: unknown to this evaluator."""
    model_selection: ModelSelectionBase | None = None
    """Receives the results; `None`: a trainer passes its own."""

    @abstractmethod
    def evaluate(self, policy: TorchPolicy) -> None:
        """Evaluate the policy as it is; results go into statistics and, where there is one, a model selection.

        :param policy: The policy, whose weights are not changed.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next evaluations depend on besides the policy, in numbers and arrays."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> list[str]:
        """Continue from a state that :meth:`state_dict` returned.

        :param state_dict: The state, possibly of an evaluator with other settings.
        :return: Sentences about parts that could not be restored; empty: the next evaluations are those that would have
            followed.
        """
        return []


def default_rollout_evaluator() -> dict[str, Any]:
    """Return the configuration of the evaluator of the best model, without environments and model selection."""
    return {
        "_target_": "maze.train.trainers.common.evaluators.rollout_evaluator.RolloutEvaluator",
        "deterministic": True,
        "n_episodes": 8,
    }
