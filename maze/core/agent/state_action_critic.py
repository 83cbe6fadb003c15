"""Interface of state-action critics."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch


class StateActionCritic(ABC):
    """Predict the value of a state-action pair, its expected discounted return."""

    @abstractmethod
    def predict_q_values(
        self,
        observations: dict[str | int, dict[str, torch.Tensor]],
        actions: dict[str | int, dict[str, torch.Tensor]],
        gather_output: bool,
    ) -> dict[str | int, list[torch.Tensor | dict[str, torch.Tensor]]]:
        """Return values of state-action pairs, by all networks of each critic.

        :param observations: Observations `[..., *shape]` by step key.
        :param actions: Actions `[..., *shape]` by step key and action head.
        :param gather_output: Where a critic returns the values of all actions of a head at once: pick those of
            `actions` (`[...]`) instead of returning all of them (`[..., n_actions]`).
        :return: For each critic a list with an entry for each of its networks: a tensor `[...]` of joint actions, or
            by action head where all heads are discrete.
        """
