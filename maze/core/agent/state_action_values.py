"""Values of actions: what state-action critics have in common with those who read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces

from maze.core.errors import ConfigError, EnvironmentContractError


def q_values_key(head: str) -> str:
    """Under which key a network returns the values of all actions of a discrete head."""
    return f"{head}_q_values"


def merged_action_space(action_spaces_dict: Mapping[Any, spaces.Dict]) -> spaces.Dict:
    """The action heads of all sub-steps.

    :raises ConfigError: Two sub-steps have a head of the same name, of which a shared critic would see only one.
    """
    heads: dict[str, spaces.Space[Any]] = {}
    for step_key, space in action_spaces_dict.items():
        for head, subspace in space.spaces.items():
            if head in heads:
                raise ConfigError(
                    f"model.critic: a shared state-action critic judges the actions of all sub-steps together, but "
                    f"`{head}` of sub-step {step_key!r} is an action head of an earlier sub-step as well. Rename it in "
                    "the action conversion, or use maze.perception.models.critics.StateActionCriticComposer."
                )
            heads[head] = subspace
    return spaces.Dict(heads)


def masked_log_probs(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities, 0 where an action is masked so that ``p * log p`` is 0 as well, and probabilities.

    :param logits: ``[..., n_actions]``; masked actions have the dtype's minimum, or minus infinity.
    """
    masked = logits <= torch.finfo(logits.dtype).min
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.masked_fill(masked, 0.0), log_probs.exp().masked_fill(masked, 0.0)


def expected_soft_value(
    q_values: torch.Tensor, logits: torch.Tensor, alpha: torch.Tensor | float, where: str = "critic"
) -> torch.Tensor:
    """Expectation of ``Q - alpha * log p`` over a categorical policy.

    :param q_values: ``[..., n_actions]``
    :param logits: ``[..., n_actions]``; masked actions have the dtype's minimum, or minus infinity.
    :param alpha: Entropy coefficient.
    :param where: Names critic and action head in messages.
    :raises EnvironmentContractError: A row has no valid action.
    """
    masked = logits <= torch.finfo(logits.dtype).min
    if bool(masked.all(-1).any()):
        row = masked.all(-1).nonzero()[0].tolist()
        raise EnvironmentContractError(
            f"{where}: no valid action is left at index {row} of the batch. The action mask must allow at least one."
        )
    log_probs, probs = masked_log_probs(logits)
    return (probs * (q_values - alpha * log_probs)).sum(-1)
