"""Small helpers for dictionaries of arrays and for gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from maze.core.trajectory_recording.records.spaces_record import stack_dicts

if TYPE_CHECKING:
    import torch


def stack_numpy_dict_list(dict_list: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack dictionaries of arrays along a new first dimension; dtypes and key order are kept.

    :param dict_list: At least one dictionary, all with the same keys and shapes.
    """
    return stack_dicts(dict_list)


def unstack_numpy_list_dict(list_dict: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """Return the inverse of :func:`stack_numpy_dict_list`: one dictionary (of views) per entry of the first dimension.

    :param list_dict: Arrays `[n, ...]` with a common first dimension.
    :raises ValueError: The arrays are not of the same length.
    """
    lengths = {key: len(value) for key, value in list_dict.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"The arrays have different lengths and cannot be unstacked: {lengths}.")
    n_items = next(iter(lengths.values()), 0)
    return [{key: value[index] for key, value in list_dict.items()} for index in range(n_items)]


def compute_gradient_norm(params: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of all gradients together; parameters without a gradient count as zero.

    :param params: Of any shape `[...]`.
    """
    import torch

    return float(torch.nn.utils.get_total_norm(param.grad.detach() for param in params if param.grad is not None))


def stack_torch_dict_list(
    dict_list: Sequence[dict[str, torch.Tensor | np.ndarray]], dim: int = 0
) -> dict[str, torch.Tensor]:
    """Stack dictionaries of tensors or arrays along a new dimension; arrays become tensors.

    :param dict_list: At least one dictionary, all with the same keys and shapes.
    :param dim: Position of the new dimension.
    :raises ValueError: The dictionaries have different keys.
    """
    import torch

    keys = dict_list[0].keys()
    for index, other in enumerate(dict_list):
        if other.keys() != keys:
            raise ValueError(f"Element 0 has the keys {sorted(keys)}, element {index} has {sorted(other)}.")
    return {key: torch.stack([torch.as_tensor(one[key]) for one in dict_list], dim=dim) for key in keys}
