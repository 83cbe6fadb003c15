"""Composes step state critics."""

from __future__ import annotations

from maze.core.agent.torch_state_critic import TorchStepStateCritic
from maze.perception.models.critics.base_state_critic_composer import StepNetworksCriticComposer


class StepStateCriticComposer(StepNetworksCriticComposer):
    """Builds a critic with one network for each sub-step.

    The arguments are those of :class:`StepNetworksCriticComposer`.
    """

    critic_class = TorchStepStateCritic
