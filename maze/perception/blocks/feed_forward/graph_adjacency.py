"""What graph blocks do with adjacency matrices."""

from __future__ import annotations

import torch


class GraphAdjacencyMethods:
    """Preparation of dense adjacency matrices ``(batch, nodes, nodes)``; row ``i`` holds what node ``i`` receives."""

    @staticmethod
    def add_self_connections(adjacency: torch.Tensor, importance: float | torch.Tensor) -> torch.Tensor:
        """Adds ``importance`` to the diagonal."""
        eye = torch.eye(adjacency.shape[-1], dtype=adjacency.dtype, device=adjacency.device)
        return adjacency + importance * eye

    @staticmethod
    def normalise(adjacency: torch.Tensor) -> torch.Tensor:
        """Symmetric normalisation by the square roots of the degrees (Kipf and Welling 2017, eq. 2).

        A node without connections neither sends nor receives.
        """
        degree = adjacency.sum(dim=-1)
        connected = degree > 0
        # Filled before the root, so that the gradient of a node without connections is zero and not NaN.
        inverse_root = degree.masked_fill(~connected, 1.0).rsqrt().masked_fill(~connected, 0.0)
        return inverse_root.unsqueeze(-1) * adjacency * inverse_root.unsqueeze(-2)

    @staticmethod
    def neighbourhood(adjacency: torch.Tensor) -> torch.Tensor:
        """Boolean: whether node ``i`` attends to node ``j``; each node attends to itself."""
        eye = torch.eye(adjacency.shape[-1], dtype=torch.bool, device=adjacency.device)
        return (adjacency != 0) | eye
