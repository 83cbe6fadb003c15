"""Embeddings shared by the networks of a sub-step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maze.perception.blocks.base import NonLinearity, PerceptionBlock
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.general.concat import ConcatenationBlock
from maze.perception.blocks.general.functional import FunctionalBlock
from maze.perception.blocks.general.repeat_to_match import RepeatToMatchBlock

Shapes = dict[str, Sequence[int]]
Blocks = dict[str, PerceptionBlock]

_LENGTH_UNIT = 20.0
"""Lengths are divided by it, so that the networks can tell sizes apart that differ by a few units."""


def in_length_units(lengths: torch.Tensor) -> torch.Tensor:
    """Bring lengths to the scale of network inputs."""
    return lengths / _LENGTH_UNIT


def piece_embedding(obs_shapes: Shapes, non_lin: NonLinearity, hidden_units: Sequence[int]) -> Blocks:
    """Embed each piece on stock together with the order: `pieces` of shape `(slots, hidden_units[-1])`."""
    blocks = _scaled(obs_shapes, "inventory", "ordered_piece")
    stock, order = blocks["inventory_scaled"].out_shapes()[0], blocks["ordered_piece_scaled"].out_shapes()[0]
    blocks["order_repeated"] = RepeatToMatchBlock(
        in_keys=["ordered_piece_scaled", "inventory_scaled"],
        out_keys="order_repeated",
        in_shapes=[order, stock],
        repeat_at_idx=1,
    )
    repeated = blocks["order_repeated"].out_shapes()[0]
    return _embedded(blocks, ["inventory_scaled", "order_repeated"], [stock, repeated], "pieces", non_lin, hidden_units)


def cut_embedding(obs_shapes: Shapes, non_lin: NonLinearity, hidden_units: Sequence[int]) -> Blocks:
    """Embed the selected piece together with the order: `cut` of shape `(hidden_units[-1],)`."""
    keys = ("selected_piece", "ordered_piece")
    blocks = _scaled(obs_shapes, *keys)
    in_keys = [f"{key}_scaled" for key in keys]
    in_shapes = [blocks[key].out_shapes()[0] for key in in_keys]
    return _embedded(blocks, in_keys, in_shapes, "cut", non_lin, hidden_units)


def _scaled(obs_shapes: Shapes, *keys: str) -> Blocks:
    return {
        f"{key}_scaled": FunctionalBlock(
            in_keys=key, out_keys=f"{key}_scaled", in_shapes=obs_shapes[key], func=in_length_units
        )
        for key in keys
    }


def _embedded(
    blocks: Blocks,
    in_keys: list[str],
    in_shapes: list[Sequence[int]],
    out_key: str,
    non_lin: NonLinearity,
    hidden_units: Sequence[int],
) -> Blocks:
    blocks["concat"] = ConcatenationBlock(in_keys=in_keys, out_keys="concat", in_shapes=in_shapes, concat_dim=-1)
    blocks[out_key] = DenseBlock(
        in_keys="concat",
        out_keys=out_key,
        in_shapes=blocks["concat"].out_shapes(),
        hidden_units=hidden_units,
        non_lin=non_lin,
    )
    return blocks
