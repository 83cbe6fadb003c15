"""A policy network and a critic with an embedding of their own for each observation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

Shapes = Mapping[str, Sequence[int]]


class ObservationEmbedding(nn.Module):
    """One linear layer for each observation; the results are added up.

    :param obs_shapes: Shapes of the observations, which are vectors.
    :param n_features: Size of the result.
    """

    def __init__(self, obs_shapes: Shapes, n_features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({key: nn.Linear(shape[0], n_features) for key, shape in obs_shapes.items()})

    def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(torch.stack([layer(x[key]) for key, layer in self.layers.items()]).sum(0))


class BatteryPolicyNet(nn.Module):
    """Logits of all actions.

    :param obs_shapes: Shapes of the observations.
    :param action_logits_shapes: Shapes of the logits.
    :param n_features: Width of the layers.
    """

    def __init__(self, obs_shapes: Shapes, action_logits_shapes: Shapes, n_features: int) -> None:
        super().__init__()
        self.embedding = ObservationEmbedding(obs_shapes, n_features)
        self.hidden = nn.Sequential(nn.Linear(n_features, n_features), nn.Tanh())
        self.heads = nn.ModuleDict(
            {key: nn.Linear(n_features, shape[0]) for key, shape in action_logits_shapes.items()}
        )

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        features = self.hidden(self.embedding(x))
        return {key: head(features) for key, head in self.heads.items()}


class BatteryValueNet(nn.Module):
    """The value of a state.

    :param obs_shapes: Shapes of the observations.
    :param n_features: Width of the layers.
    """

    def __init__(self, obs_shapes: Shapes, n_features: int) -> None:
        super().__init__()
        self.embedding = ObservationEmbedding(obs_shapes, n_features)
        self.value = nn.Sequential(nn.Linear(n_features, n_features), nn.Tanh(), nn.Linear(n_features, 1))

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"value": self.value(self.embedding(x))}
