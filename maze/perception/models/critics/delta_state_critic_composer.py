"""Composes delta state critics."""

from __future__ import annotations

from maze.core.agent.torch_state_critic import TorchDeltaStateCritic
from maze.perception.models.critics.base_state_critic_composer import StepNetworksCriticComposer


class DeltaStateCriticComposer(StepNetworksCriticComposer):
    """Builds a critic that predicts the first sub-step's value and the others' differences from it.

    The arguments are those of :class:`StepNetworksCriticComposer`.
    """

    critic_class = TorchDeltaStateCritic
