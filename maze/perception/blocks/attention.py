"""PyTorch's multi-head attention with masks as observations hold them."""

from __future__ import annotations

import torch
from torch import nn


def masked_attention(
    attention: nn.MultiheadAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    valid: torch.Tensor | None,
    need_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of each query to the valid keys. A query without any valid key gets zeros, where PyTorch gives NaN.

    :param attention: A module with ``batch_first=True``.
    :param query: ``(batch, queries, features)``.
    :param key: ``(batch, keys, features)``.
    :param value: ``(batch, keys, features)``.
    :param valid: Positive where a key counts: ``(batch, keys)``, or ``(batch, queries, keys)``; None: all do.
    :param need_weights: Whether to return the weights as well, averaged over the heads: ``(batch, queries, keys)``.
    """
    if valid is None:
        output, weights = attention(query, key, value, need_weights=need_weights)
        return output, weights

    ignored = valid <= 0
    is_per_query = ignored.dim() == 3
    nothing_valid = ignored.all(dim=-1, keepdim=True)
    ignored = ignored & ~nothing_valid  # all keys count for now, and the result is replaced below
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
