"""Axes of tensors with any number of leading batch dimensions."""

from __future__ import annotations

from maze.core.errors import ConfigError


def axis_from_end(block_name: str, argument: str, axis: int, n_dims: int) -> int:
    """The axis counted from the end (negative), which holds for any number of leading batch dimensions.

    :param block_name: For the error message.
    :param argument: For the error message.
    :param axis: Negative: counted from the end. Otherwise counted with one batch dimension at 0.
    :param n_dims: Number of dimensions without batch.
    """
    from_end = axis if axis < 0 else axis - (n_dims + 1)
    if not -n_dims <= from_end <= -1:
        raise ConfigError(
            f"{block_name}: `{argument}` must lie in [1, {n_dims}] (0 is the batch) or in [-{n_dims}, -1] for tensors "
            f"with {n_dims} dimensions (without batch), found {axis}."
        )
    return from_end


def index_from_start(block_name: str, argument: str, index: int, size: int) -> int:
    """The non-negative form of an index into an axis with ``size`` entries."""
    if not -size <= index < size:
        raise ConfigError(f"{block_name}: `{argument}` must lie in [{-size}, {size - 1}], found {index}.")
    return index % size
