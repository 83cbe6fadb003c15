"""What decides which model of a training is kept."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any


class ModelSelectionBase(ABC):
    """Receives the evaluation results of the model being trained."""

    maximize: bool = True
    """False: scores are the negated values of a statistic of which less is better."""
    keeps_latest: bool = False
    """Whether the latest model that was evaluated is kept, although another one scored better."""
    last_improvement: int = 0
    """Number of evaluations since the best one."""

    @abstractmethod
    def update(self, reward: float) -> None:
        """Takes notice of an evaluation of the current model.

        :param reward: Mean reward of the evaluation; more is better.
        """

    def update_constrained(self, reward: float, violation: float) -> None:
        """Takes notice of an evaluation that had constraints to fulfil.

        :param reward: Score of the evaluation; more is better.
        :param violation: How far it is from fulfilling them; 0: it does.
        """
        self.update(reward if violation == 0 else -math.inf)

    def training_started(self) -> None:
        """Takes notice of the start of a training that says when its epochs are completed."""
        return

    def epoch_completed(self, epoch: int) -> None:
        """Takes notice of the end of an epoch, which comes before the evaluation of what it led to.

        :param epoch: Number of completed epochs.
        """
        return

    def training_ended(self) -> None:
        """Takes notice of the end of a training, after its last evaluation."""
        return

    def state_dict(self) -> dict[str, Any]:
        """What the next comparisons depend on; tensors and plain values."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned."""
