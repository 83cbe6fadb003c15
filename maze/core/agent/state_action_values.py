"""Values of actions: what state-action critics have in common with those who read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from gymnasium import spaces
from torch.nn import functional

from maze.core.errors import ConfigError, EnvironmentContractError


def are_all_discrete(action_space: spaces.Dict) -> bool:
    """Whether all heads are `Discrete`, so that a network can return the values of all actions at once."""
    return all(isinstance(space, spaces.Discrete) for space in action_space.spaces.values())


def encoded_size(space: spaces.Space[Any], head: str) -> int:
    """Number of features that :func:`encode_action` gives for one action head.

    :raises ConfigError: The space has no encoding.
    """
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.sum())
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return max(1, torch.Size(space.shape or ()).numel())
    raise ConfigError(f"Action head `{head}`: state-action critics cannot process {space}.")


def encode_action(space: spaces.Space[Any], action: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Choices as one-hot vectors, numbers as they are (with their gradients).

    >>> encode_action(spaces.MultiDiscrete([2, 3]), torch.tensor([1, 0]), torch.float32)
    tensor([0., 1., 1., 0., 0.])

    :param space: Space of one action head.
    :param action: `[..., *space.shape]` with any leading batch dimensions.
    :param dtype: Floating type of the features.
    :return: `[..., encoded_size(space)]`
    """
    n_dims = len(space.shape or ())
    if isinstance(space, spaces.Discrete):
        return functional.one_hot(action.long(), int(space.n)).to(dtype)
    flat = action.flatten(action.dim() - n_dims) if n_dims else action.unsqueeze(-1)
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(size) for size in space.nvec.flatten()]
        parts = [functional.one_hot(flat[..., index].long(), size) for index, size in enumerate(sizes)]
        return torch.cat(parts, dim=-1).to(dtype)
    return flat.to(dtype)


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
    """Log-probabilities, 0 where an action is masked so that `p * log p` is 0 as well, and probabilities.

    :param logits: `[..., n_actions]`; masked actions have the dtype's minimum, or minus infinity.
    """
    masked = logits <= torch.finfo(logits.dtype).min
    log_probs = torch.log_softmax(logits, dim=-1)
    return log_probs.masked_fill(masked, 0.0), log_probs.exp().masked_fill(masked, 0.0)


def expected_soft_value(
    q_values: torch.Tensor, logits: torch.Tensor, alpha: torch.Tensor | float, where: str = "critic"
) -> torch.Tensor:
    """Expectation of `Q - alpha * log p` over a categorical policy.

    :param q_values: `[..., n_actions]`
    :param logits: `[..., n_actions]`; masked actions have the dtype's minimum, or minus infinity.
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
