"""Pooling over axes of which parts may be masked."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from maze.core.errors import ConfigError

POOLING_FUNCTIONS = ("mean", "sum", "max", "min")


def check_pooling_function(block_name: str, argument: str, name: str) -> None:
    """Raises an error that names what there is."""
    if name not in POOLING_FUNCTIONS:
        raise ConfigError(f"{block_name}: `{argument}` must be one of {', '.join(POOLING_FUNCTIONS)}, found {name!r}.")


def pool(features: torch.Tensor, name: str, dims: Sequence[int], valid: torch.Tensor | None = None) -> torch.Tensor:
    """Pools ``features`` over ``dims``; what is not valid does not count, and nothing valid gives zero.

    :param features: The tensor to pool.
    :param name: One of ``POOLING_FUNCTIONS``.
    :param dims: The axes to pool over, which the result no longer has.
    :param valid: Boolean, broadcastable to ``features``.
    """
    axes = tuple(dims)
    if valid is None:
        if name == "mean":
            return features.mean(axes)
        if name == "sum":
            return features.sum(axes)
        return features.amax(axes) if name == "max" else features.amin(axes)

    valid = valid.expand_as(features)
    if name in ("mean", "sum"):
        total = features.masked_fill(~valid, 0.0).sum(axes)
        return total if name == "sum" else total / valid.sum(axes).clamp(min=1).to(total.dtype)
    limits = torch.finfo(features.dtype)
    extreme = (
        features.masked_fill(~valid, limits.min).amax(axes)
        if name == "max"
        else features.masked_fill(~valid, limits.max).amin(axes)
    )
    return extreme.masked_fill(valid.sum(axes) == 0, 0.0)
