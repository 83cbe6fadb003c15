"""Interface of model selections."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class ModelSelectionBase(ABC):
    """Receive the evaluation results of the model being trained."""

    maximize: bool = True
    """False: scores are the negated values of a statistic of which less is better."""
    keeps_latest: bool = False
    """Whether the latest model that was evaluated is kept, although another one scored better."""
    last_improvement: int = 0
    """Number of evaluations since the best one."""

    @abstractmethod
    def update(self, reward: float) -> None:
        """Receive the score of the current model.

        :param reward: Mean reward of the evaluation; more is better.
        """

    def update_constrained(self, reward: float, violation: float) -> None:
        """Receive the score of the current model and its violation of constraints.

        :param reward: Score of the evaluation; more is better.
        :param violation: How far it is from fulfilling them; 0: it does.
        """
        self.update(reward if violation == 0 else -math.inf)

    def training_started(self) -> None:
        """Notify of the start of a run that reports its epochs."""
        return

    def epoch_completed(self, epoch: int) -> None:
        """Notify of the end of an epoch, before its evaluation.

        :param epoch: Number of completed epochs.
        """
        return

    def training_ended(self) -> None:
        """Notify of the end of a run, after its last evaluation."""
        return

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next comparisons depend on; tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned."""
