"""Graph convolutions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.weight_init import activation_type


class GraphAdjacencyMethods:
    """Preparation of dense adjacency matrices `(batch, nodes, nodes)`; row `i` holds the inputs of node `i`."""

    @staticmethod
    def normalise(adjacency: torch.Tensor) -> torch.Tensor:
        """Normalise symmetrically by the square roots of the degrees (Kipf and Welling 2017, eq. 2).

        A node without connections neither sends nor receives.

        :param adjacency: `[..., nodes, nodes]`, weights of at least 0; the result has the same shape.
        """
        degree = adjacency.sum(dim=-1)
        connected = degree > 0
        # Filled before the root, so that the gradient of a node without connections is zero and not NaN.
        inverse_root = degree.masked_fill(~connected, 1.0).rsqrt().masked_fill(~connected, 0.0)
        return inverse_root.unsqueeze(-1) * adjacency * inverse_root.unsqueeze(-2)

    @staticmethod
    def neighbourhood(adjacency: torch.Tensor) -> torch.Tensor:
        """Return whether node `i` attends to node `j`, boolean; each node attends to itself.

        :param adjacency: `[..., nodes, nodes]`; the result has the same shape.
        """
        eye = torch.eye(adjacency.shape[-1], dtype=torch.bool, device=adjacency.device)
        return (adjacency != 0) | eye


class GraphBlock(ShapeNormalizationBlock, GraphAdjacencyMethods):
    """Base of graph networks: node features `(batch, nodes, features)` and adjacency `(batch, nodes, nodes)`.

    :param hidden_features: Number of features of each layer.
    :param non_lins: The activation after each layer; one, or one per layer.
    :raises ConfigError: There is not one setting for each layer.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_features: Sequence[int],
        non_lins: NonLinearity | Sequence[NonLinearity],
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=3, out_num_dims=3)
        self.input_features = self.in_shapes[0][-1]
        self.hidden_features = list(hidden_features)
        self.non_lins = [
            activation_type(non_lin, f"{self.block_name}.non_lin") for non_lin in self._per_layer("non_lins", non_lins)
        ]

    def _per_layer(self, argument: str, value: Any) -> list[Any]:
        """Return the value of each layer; one value holds for all layers.

        :raises ConfigError: There is another number of values.
        """
        n_layers = len(self.hidden_features)
        if isinstance(value, str) or not isinstance(value, Sequence):
            return [value] * n_layers
        if len(value) != n_layers:
            raise ConfigAssertionError(
                f"{self.block_name}: `{argument}` must be one value or one for each of the {n_layers} layers, "
                f"found {len(value)}."
            )
        return list(value)


class GraphConvLayer(nn.Module):
    """One graph convolution: a linear map of each node, then a weighted sum over its neighbours."""

    def __init__(self, n_in: int, n_out: int, bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, n_out, bias=False)
        self.bias = nn.Parameter(torch.zeros(n_out)) if bias else None

    def forward(self, features: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        """Combine the features of the neighbours of each node.

        :param features: `(batch, nodes, n_in)`.
        :param adjacency: Weights of the neighbours, `(batch, nodes, nodes)`.
        :return: `(batch, nodes, n_out)`.
        """
        result = torch.bmm(adjacency, self.linear(features))
        return result if self.bias is None else result + self.bias


class GraphConvBlock(GraphBlock):
    """Stack of graph convolutions (Kipf and Welling 2017), each followed by its activation.

    Inputs node features `(batch, nodes, features)` and adjacency matrix `(batch, nodes, nodes)`, output
    `(batch, nodes, hidden_features[-1])`.

    :param in_keys: Keys of the node features and of the adjacency matrix.
    :param hidden_features: Number of features of each layer.
    :param bias: Whether layers have a bias; one value, or one per layer.
    :param non_lins: The activation after each layer; one, or one per layer.
    :param node_self_importance: Weight of each node's connection to itself.
    :param trainable_node_self_importance: Whether this weight is learned.
    :param preprocess_adj: Whether self connections are added and the matrix is normalised; otherwise it is used as
        it is.
    """

    node_self_importance: torch.Tensor

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_features: Sequence[int],
        bias: bool | Sequence[bool],
        non_lins: NonLinearity | Sequence[NonLinearity],
        node_self_importance: float,
        trainable_node_self_importance: bool,
        preprocess_adj: bool,
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, hidden_features, non_lins)
        self.output_features = self.hidden_features[-1]
        self.bias = self._per_layer("bias", bias)
        self.preprocess_adj = preprocess_adj
        importance = torch.tensor(float(node_self_importance))
        if trainable_node_self_importance:
            self.node_self_importance = nn.Parameter(importance)
        else:
            self.register_buffer("node_self_importance", importance, persistent=False)
        self.net = nn.ModuleDict(self.build_layer_dict())

    def build_layer_dict(self) -> OrderedDict[str, nn.Module]:
        """Build the layers in order, by name."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for index, (n_in, n_out) in enumerate(pairwise([self.input_features, *self.hidden_features])):
            layers[f"graph_conv_{index}"] = GraphConvLayer(n_in, n_out, self.bias[index])
            layers[f"{self.non_lins[index].__name__}_{index}"] = self.non_lins[index]()
        return layers

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        features, adjacency = (block_input[key] for key in self.in_keys)
        if self.preprocess_adj:
            eye = torch.eye(adjacency.shape[-1], dtype=adjacency.dtype, device=adjacency.device)
            adjacency = self.normalise(adjacency + self.node_self_importance * eye)
        for layer in self.net.values():
            features = layer(features, adjacency) if isinstance(layer, GraphConvLayer) else layer(features)
        return {self.out_keys[0]: features}
