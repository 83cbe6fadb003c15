"""Settings that hold for all layers of a block, or for one each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from maze.core.errors import ConfigError
from maze.perception.blocks.base import PerceptionBlock


def one_per_layer(block_name: str, argument: str, value: Any, n_layers: int) -> list[Any]:
    """The value of each layer, whether one for all or one each was given."""
    if n_layers == 0:
        raise ConfigError(f"{block_name}: `hidden_features` is empty; give one number per layer.")
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * n_layers
    if len(value) != n_layers:
        raise ConfigError(
            f"{block_name}: `{argument}` must be one value or one for each of the {n_layers} layers, "
            f"found {len(value)}."
        )
    return list(value)


def check_graph_shapes(block: PerceptionBlock) -> None:
    """Raises an error unless the inputs are node features and an adjacency matrix of the same nodes."""
    if len(block.in_keys) != 2:
        raise ConfigError(
            f"{block.block_name}: expected two input keys (node features, adjacency matrix), found {block.in_keys}."
        )
    features, adjacency = (tuple(shape) for shape in block.in_shapes)
    if len(features) < 2 or adjacency[-2:] != (features[-2], features[-2]):
        raise ConfigError(
            f"{block.block_name}: expected node features {block.in_keys[0]!r} of shape (nodes, features) and adjacency "
            f"matrix {block.in_keys[1]!r} of shape (nodes, nodes), found {features} and {adjacency}."
        )
