"""Flatten-and-concatenate networks of which the critic takes the policy's latent representation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.models.built_in import flatten_concat
from maze.perception.program.network_program import Places, ProgramReader

EMBEDDING = "latent"
"""Key of the shared tensor in the outputs of the policy and in the inputs of the critic."""


class FlattenConcatSharedEmbeddingPolicyNet(nn.Module):
    """Return the latent representation next to the logits, each of which is computed by layers of its own from it.

    :param obs_shapes: Shapes of the observations, without batch dimensions.
    :param action_logits_shapes: Shapes of the logits by action head.
    :param hidden_units: Width of each shared dense layer.
    :param head_units: Width of each dense layer between the latent representation and the logits.
    :param non_lin: Activation, as a class or an import path.
    :raises ConfigError: An action has the name of the embedding.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        action_logits_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        head_units: list[int],
        non_lin: str | type[nn.Module],
    ) -> None:
        super().__init__()
        if EMBEDDING in action_logits_shapes:
            raise ConfigError(
                f"{type(self).__name__}: `{EMBEDDING}` is the key of the shared embedding; rename the action."
            )
        self.embedding = flatten_concat.FlattenConcatBaseNet(obs_shapes, hidden_units, non_lin)
        self.policy = flatten_concat.FlattenConcatPolicyNet(
            {EMBEDDING: (self.embedding.n_latent,)}, action_logits_shapes, head_units, non_lin
        )

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return logits by action head, and the latent representation.

        :param x: Observations `[batch, ...]`.
        """
        embedding = {EMBEDDING: self.embedding.latent(x)}
        return {**self.policy(embedding), **embedding}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        embedding = {EMBEDDING: self.embedding.describe_latent(reader, inputs)}
        return {**reader.module(self.policy, embedding), **embedding}


class FlattenConcatSharedEmbeddingStateValueNet(flatten_concat.FlattenConcatStateValueNet):
    """Values from the policy's latent representation.

    :param obs_shapes: Has the shape of the latent representation; the observations are not looked at.
    :param head_units: Width of each dense layer between the latent representation and the value.
    :param non_lin: Activation, as a class or an import path.
    :raises ConfigError: The policy's network returns no embedding.
    """

    def __init__(
        self, obs_shapes: dict[str, Sequence[int]], head_units: list[int], non_lin: str | type[nn.Module]
    ) -> None:
        if EMBEDDING not in obs_shapes:
            raise ConfigError(
                f"{type(self).__name__}: the policy's network does not return `{EMBEDDING}`; found {list(obs_shapes)}. "
                "Use it together with FlattenConcatSharedEmbeddingPolicyNet."
            )
        super().__init__({EMBEDDING: obs_shapes[EMBEDDING]}, head_units, non_lin)
