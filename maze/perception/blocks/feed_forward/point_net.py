"""Features of point sets."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict, key_list, pool
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.weight_init import activation_type

_POINT_FEATURES = 64


class _PointNorm(nn.BatchNorm1d):
    """Batch normalisation; a single point, which has no deviation, is normalised by the running statistics."""

    @override(nn.BatchNorm1d)
    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if len(points) > 1:
            return super().forward(points)
        return functional.batch_norm(points, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class PointwiseLayers(nn.Module):
    """Linear layers applied to each point alike, with optional batch normalisation.

    :param widths: Number of features of the input and after each layer.
    :param activate_last: Whether the activation also follows the last layer.
    """

    def __init__(self, widths: list[int], non_lin: type[nn.Module], use_batch_norm: bool, activate_last: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for index, (n_in, n_out) in enumerate(pairwise(widths)):
            layers.append(nn.Linear(n_in, n_out, bias=not use_batch_norm))
            if use_batch_norm:
                layers.append(_PointNorm(n_out))
            if activate_last or index < len(widths) - 2:
                layers.append(non_lin())
        self.net, self.use_batch_norm = nn.Sequential(*layers), use_batch_norm

    def forward(self, points: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Apply the same layers to each point.

        :param points: `(..., widths[0])`.
        :param valid: Mask of valid points, boolean `(..., 1)`; None: all. Statistics of batches leave out the others.
        :return: `(..., widths[-1])`.
        """
        rows = points.flatten(end_dim=-2)
        if valid is not None and self.use_batch_norm and self.training:
            place = valid.flatten().nonzero().squeeze(-1)
            of_valid: torch.Tensor = self.net(rows[place])
            features = of_valid.new_zeros(len(rows), of_valid.shape[-1]).index_copy(0, place, of_valid)
        else:
            features = self.net(rows)
        return features.reshape(points.shape[:-1] + features.shape[-1:])


class AlignmentNet(nn.Module):
    """Predict from a point set the matrix that aligns its points (Qi et al. 2017, section 4.2)."""

    def __init__(self, n_features: int, embedding_dim: int, non_lin: type[nn.Module], use_batch_norm: bool) -> None:
        super().__init__()
        self.n_features = n_features
        self.points = PointwiseLayers([n_features, 64, embedding_dim], non_lin, use_batch_norm, activate_last=True)
        hidden = max(embedding_dim // 2, 16)
        self.matrix = nn.Sequential(
            nn.Linear(embedding_dim, hidden), non_lin(), nn.Linear(hidden, n_features * n_features)
        )

    def forward(self, points: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor:
        """Multiply the points by a learned transformation.

        :param points: `(batch, points, n_features)`.
        :param valid: Mask of valid points, boolean `(batch, points, 1)`; None: all.
        :return: The aligned points.
        """
        pooled = pool(self.points(points, valid), "max", [-2], valid)
        # The matrix is predicted as a difference from the identity.
        deviation = self.matrix(pooled).unflatten(-1, (self.n_features, self.n_features))
        return points + torch.bmm(points, deviation)


class PointNetFeatureBlock(ShapeNormalizationBlock):
    """Embed sets of points of any size into a vector, independent of their order (PointNet).

    Input `(batch, points, features)` and optionally a mask `(batch, points)`, positive where a point counts; output
    `(batch, embedding_dim)`.

    :param in_keys: Key of the points and, optionally, of the mask.
    :param embedding_dim: Number of features of the output.
    :param pooling_func_name: Pooling over points: `max`, `mean`, `sum` or `min`.
    :param use_feature_transform: Whether intermediate features are aligned by a predicted matrix, as the points are.
    :param use_batch_norm: Whether layers that are applied to each point are followed by batch normalisation.
    :param non_lin: The activation between layers.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        embedding_dim: int,
        pooling_func_name: str,
        use_feature_transform: bool,
        use_batch_norm: bool,
        non_lin: NonLinearity,
    ) -> None:
        in_num_dims = [3, 2][: len(key_list(in_keys))]
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims, out_num_dims=2)
        self.embedding_dim = self.output_units = embedding_dim
        self.pooling_func_name = pooling_func_name
        self.use_feature_transform = use_feature_transform
        activation = activation_type(non_lin, f"{self.block_name}.non_lin")
        n_features = self.in_shapes[0][-1]
        self.point_transform = AlignmentNet(n_features, embedding_dim, activation, use_batch_norm)
        self.point_features = PointwiseLayers(
            [n_features, _POINT_FEATURES, _POINT_FEATURES], activation, use_batch_norm, activate_last=True
        )
        if use_feature_transform:
            self.feature_transform = AlignmentNet(_POINT_FEATURES, embedding_dim, activation, use_batch_norm)
        self.embedding = PointwiseLayers(
            [_POINT_FEATURES, 2 * _POINT_FEATURES, embedding_dim], activation, use_batch_norm, activate_last=False
        )

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        points, *masks = (block_input[key] for key in self.in_keys)
        valid = (masks[0] > 0).unsqueeze(-1) if masks else None
        features = self.point_features(self.point_transform(points, valid), valid)
        if self.use_feature_transform:
            features = self.feature_transform(features, valid)
        return {self.out_keys[0]: pool(self.embedding(features, valid), self.pooling_func_name, [-2], valid)}
