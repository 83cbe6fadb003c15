"""Functions shared by blocks: masked attention and pooling, and axes counted from the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from maze.core.errors import ConfigAssertionError, unknown_key_error
from maze.perception.blocks.base import Shapes, shape_list


def sequence_dims(in_shapes: Shapes, n_keys: int, n_dims: Sequence[int]) -> list[int]:
    """Return the numbers of dimensions of the inputs of attention; flat inputs are sequences of a single element.

    :param in_shapes: Shapes of the inputs, as given to a block.
    :param n_keys: Number of inputs.
    :param n_dims: Numbers of dimensions, with one batch dimension, of inputs that are not flat.
    """
    shapes = shape_list(in_shapes, n_keys)
    return [n - 1 if n == 3 and len(shape) == 1 else n for shape, n in zip(shapes, n_dims, strict=False)]


def masked_attention(
    attention: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    valid: torch.Tensor | None,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the attention of each query to the valid keys; zeros for a query without any valid key.

    :param attention: A module with `batch_first=True`.
    :param query: `(batch, queries, features)`.
    :param key: `(batch, keys, features)`.
    :param value: `(batch, keys, features)`.
    :param valid: Positive for valid keys: `(batch, keys)`, or `(batch, queries, keys)`; None: all are valid.
    :param need_weights: Whether to return the weights as well, averaged over the heads: `(batch, queries, keys)`.
    """
    if valid is None:
        output, weights = attention(query, key, value, need_weights=need_weights)
        return output, weights

    ignored = valid <= 0
    is_per_query = ignored.dim() == 3
    nothing_valid = ignored.all(dim=-1, keepdim=True)
    ignored = ignored & ~nothing_valid  # avoids NaN; the result is replaced below
    output, weights = attention(
        query,
        key,
        value,
        key_padding_mask=None if is_per_query else ignored,
        attn_mask=ignored.repeat_interleave(attention.num_heads, dim=0) if is_per_query else None,
        need_weights=need_weights,
    )
    queries_without_key = nothing_valid if is_per_query else nothing_valid.unsqueeze(-1)
    if weights is not None:
        weights = weights.masked_fill(queries_without_key, 0.0)
    return output.masked_fill(queries_without_key, 0.0), weights


def check_heads(block_name: str, num_heads: int, n_features: int) -> None:
    """Raise a `ConfigError` unless the attention heads divide the features."""
    if n_features % num_heads:
        raise ConfigAssertionError(
            f"{block_name}: `num_heads` ({num_heads}) must divide the number of features ({n_features})."
        )


_POOLING: Mapping[str, Callable[..., torch.Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def pooling_name(block_name: str, name: str) -> str:
    """Return the name of a pooling function.

    :raises ConfigError: There is no such function; names the known ones.
    """
    if name not in _POOLING:
        raise unknown_key_error(f"{block_name}: pooling function", name, _POOLING)
    return name


def pool(features: torch.Tensor, name: str, dims: Sequence[int], valid: torch.Tensor | None = None) -> torch.Tensor:
    """Pool the valid features over `dims`; zero where no feature is valid.

    :param features: The tensor to pool.
    :param name: `mean`, `sum`, `max` or `min`.
    :param dims: The axes to pool over, which the result no longer has.
    :param valid: Boolean, broadcastable to `features`.
    :return: The shape of `features` without the axes `dims`.
    """
    axes = tuple(dims)
    if valid is None:
        return _POOLING[name](features, axes)
    valid = valid.expand_as(features)
    n_valid = valid.sum(axes)
    if name in ("mean", "sum"):
        total = features.masked_fill(~valid, 0.0).sum(axes)
        return total if name == "sum" else total / n_valid.clamp(min=1).to(total.dtype)
    limits = torch.finfo(features.dtype)
    excluded = limits.min if name == "max" else limits.max
    return _POOLING[name](features.masked_fill(~valid, excluded), axes).masked_fill(n_valid == 0, 0.0)


def axis_from_end(block_name: str, argument: str, axis: int, n_dims: int) -> int:
    """Return the axis counted from the end (negative), valid for any number of leading batch dimensions.

    :param block_name: For the error message.
    :param argument: For the error message.
    :param axis: Negative: counted from the end. Otherwise counted with one batch dimension at 0.
    :param n_dims: Number of dimensions without batch.
    :raises ConfigError: There is no such axis, or it is the batch.
    """
    from_end = axis if axis < 0 else axis - (n_dims + 1)
    if not -n_dims <= from_end <= -1:
        raise ConfigAssertionError(
            f"{block_name}: `{argument}` must lie in [1, {n_dims}] (0 is the batch) or in [-{n_dims}, -1] for tensors "
            f"with {n_dims} dimensions (without batch), found {axis}."
        )
    return from_end
