"""Graph attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict
from maze.perception.blocks.feed_forward.graph_conv import GraphBlock
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock


class GraphAttentionLayer(nn.Module):
    """One multi-head graph attention (Velickovic et al. 2018, eq. 1-6).

    :param n_in: Number of input features.
    :param n_out: Number of output features of each head.
    :param n_heads: Number of heads.
    :param alpha: Slope of the leaky ReLU for negative attention scores.
    :param dropout: Share of attention coefficients dropped in training.
    :param average: Whether heads are averaged; otherwise they are concatenated.
    """

    def __init__(self, n_in: int, n_out: int, *, n_heads: int, alpha: float, dropout: float, average: bool) -> None:
        super().__init__()
        self.n_out, self.n_heads, self.alpha, self.average = n_out, n_heads, alpha, average
        self.linear = nn.Linear(n_in, n_heads * n_out, bias=False)
        self.attention_receiver = nn.Parameter(torch.empty(n_heads, n_out))
        self.attention_sender = nn.Parameter(torch.empty(n_heads, n_out))
        nn.init.xavier_uniform_(self.attention_receiver)
        nn.init.xavier_uniform_(self.attention_sender)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        """Attend to the neighbours of each node.

        :param features: `(batch, nodes, n_in)`.
        :param neighbours: Whether a node attends to another, boolean `(batch, nodes, nodes)`.
        :return: `(batch, nodes, n_out)` averaged, or `(batch, nodes, n_heads * n_out)` concatenated.
        """
        nodes = self.linear(features).unflatten(-1, (self.n_heads, self.n_out)).transpose(-3, -2)
        # The score of a pair is the sum of what its two nodes contribute: no tensor of all pairs of features is built.
        receiver = torch.einsum("bhnf,hf->bhn", nodes, self.attention_receiver)
        sender = torch.einsum("bhnf,hf->bhn", nodes, self.attention_sender)
        scores = functional.leaky_relu(receiver.unsqueeze(-1) + sender.unsqueeze(-2), self.alpha)
        scores = scores.masked_fill(~neighbours.unsqueeze(-3), torch.finfo(scores.dtype).min)
        heads: torch.Tensor = self.dropout(scores.softmax(dim=-1)) @ nodes
        return heads.mean(dim=-3) if self.average else heads.transpose(-3, -2).flatten(start_dim=-2)


class GraphAttentionBlock(GraphBlock):
    """Stack of multi-head graph attentions, each followed by its activation.

    Inputs node features `(batch, nodes, features)` and adjacency matrix `(batch, nodes, nodes)`, in which
    node `i` attends to the nodes with entries other than zero; each node also attends to itself. Output `(batch, nodes,
    hidden_features[-1])` where the heads of the last layer are averaged, otherwise `n_heads` times as many features.

    :param in_keys: Keys of the node features and of the adjacency matrix.
    :param hidden_features: Number of features of each head, for each layer.
    :param non_lins: The activation after each layer; one, or one per layer.
    :param n_heads: Number of heads; one value, or one per layer.
    :param attention_alpha: Slope of the leaky ReLU for negative attention scores; one value, or one per layer.
    :param avg_last_head_attentions: Whether the heads of the last layer are averaged instead of concatenated.
    :param attention_dropout: Share of attention coefficients dropped in training; one value, or one per layer.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_features: Sequence[int],
        non_lins: NonLinearity | Sequence[NonLinearity],
        n_heads: int | Sequence[int],
        attention_alpha: float | Sequence[float],
        avg_last_head_attentions: bool,
        attention_dropout: float | Sequence[float],
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes, hidden_features, non_lins)
        self.n_heads = self._per_layer("n_heads", n_heads)
        self.attention_alpha = self._per_layer("attention_alpha", attention_alpha)
        self.attention_dropout = self._per_layer("attention_dropout", attention_dropout)
        self.avg_last_head_attentions = avg_last_head_attentions
        self.net = nn.ModuleDict(self.build_layer_dict())
        n_heads_joined = 1 if avg_last_head_attentions else self.n_heads[-1]
        self.output_features = self.hidden_features[-1] * n_heads_joined

    def build_layer_dict(self) -> OrderedDict[str, nn.Module]:
        """Build the layers in order, by name."""
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        n_in = self.input_features
        for index, n_out in enumerate(self.hidden_features):
            average = self.avg_last_head_attentions and index == len(self.hidden_features) - 1
            layers[f"graph_attention_{index}"] = GraphAttentionLayer(
                n_in,
                n_out,
                n_heads=self.n_heads[index],
                alpha=self.attention_alpha[index],
                dropout=self.attention_dropout[index],
                average=average,
            )
            layers[f"{self.non_lins[index].__name__}_{index}"] = self.non_lins[index]()
            n_in = n_out if average else n_out * self.n_heads[index]
        return layers

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        features, adjacency = (block_input[key] for key in self.in_keys)
        neighbours = self.neighbourhood(adjacency)
        for layer in self.net.values():
            features = layer(features, neighbours) if isinstance(layer, GraphAttentionLayer) else layer(features)
        return {self.out_keys[0]: features}
