"""What decides which model of a training is kept."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ModelSelectionBase(ABC):
    """Receives the evaluation results of the model being trained."""

    @abstractmethod
    def update(self, reward: float) -> None:
        """Takes notice of an evaluation of the current model.

        :param reward: Mean reward of the evaluation; more is better.
        """
