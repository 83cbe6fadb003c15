"""Helpers around networks: shapes from spaces, merging sub-steps, converting between NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from gymnasium import spaces as gym_spaces

Item = TypeVar("Item")


def observation_spaces_to_in_shapes(
    observation_spaces: Mapping[int | str, gym_spaces.Dict],
) -> dict[int | str, dict[str, Sequence[int]]]:
    """Return shapes of all observations by step key and observation key, without batch dimensions.

    :raises ValueError: An observation has no shape.
    """
    in_shapes: dict[int | str, dict[str, Sequence[int]]] = {}
    for step_key, space in observation_spaces.items():
        shapes: dict[str, Sequence[int]] = {}
        for key, subspace in space.spaces.items():
            if subspace.shape is None:
                raise ValueError(f"Observation `{key}` of sub-step {step_key!r} has no shape: {subspace}.")
            shapes[key] = tuple(subspace.shape)
        in_shapes[step_key] = shapes
    return in_shapes


def flatten_spaces(spaces: Iterable[Mapping[str, Item]]) -> dict[str, Item]:
    """Merge the dictionaries of subsequent sub-steps into one.

    Where sub-steps have keys in common, the first sub-step's item stays: it is the state that the environment step
    starts in.

    >>> flatten_spaces([{"a": torch.tensor(1)}, {"a": torch.tensor(2), "b": torch.tensor(3)}])
    {'a': tensor(1), 'b': tensor(3)}
    """
    merged: dict[str, Item] = {}
    for space in spaces:
        for key, value in space.items():
            merged.setdefault(key, value)
    return merged


def stack_and_flatten_spaces(
    input_tensor_dict: Iterable[Mapping[str, torch.Tensor]],
    observation_spaces_dict: Mapping[str | int, gym_spaces.Dict],
) -> dict[str, torch.Tensor]:
    """Merge the dictionaries of subsequent sub-steps into one; items of the same key are stacked.

    A key that several sub-steps (e.g. agents) have is stacked along a new dimension in front of the item's own
    dimensions, behind all batch dimensions. A key that occurs once is left as it is.

    :param input_tensor_dict: Items `[..., *shape]` for each sub-step.
    :param observation_spaces_dict: Tells how many dimensions an item has of its own.
    """
    collected: dict[str, list[torch.Tensor]] = {}
    for tensor_dict in input_tensor_dict:
        for key, tensor in tensor_dict.items():
            collected.setdefault(key, []).append(tensor)
    entries = (entry for space in observation_spaces_dict.values() for entry in space.spaces.items())
    n_dims = {key: len(subspace.shape or ()) for key, subspace in entries}
    # embeddings are in no space; they are vectors
    return {
        key: tensors[0] if len(tensors) == 1 else torch.stack(tensors, dim=tensors[0].dim() - n_dims.get(key, 1))
        for key, tensors in collected.items()
    }


def convert_to_torch(
    stats: Any, device: str | None = None, cast: torch.dtype | None = None, in_place: bool | str = False
) -> Any:
    """Convert arrays and numbers, anywhere in dictionaries, lists and tuples, to tensors.

    :param stats: Any structure; what is neither array, number nor tensor stays as it is.
    :param device: Device of the tensors; `None`: unchanged.
    :param cast: Their dtype; `None` keeps it.
    :param in_place: Replace the items of dictionaries and lists instead of building new ones. The string `try` does
        so where the structure allows it.
    :return: The converted structure. On the CPU and without a change of the dtype, tensors share the memory of arrays.
    :raises TypeError: The structure has a tuple, and `in_place` is true.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor | np.ndarray | np.generic | bool | int | float):
            if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
                return value
            return torch.as_tensor(value).to(device=device, dtype=cast)
        return value

    return _convert(stats, leaf, in_place)


def convert_to_numpy(stats: Any, cast: np.dtype[Any] | None = None, in_place: bool | str = False) -> Any:
    """Convert tensors, anywhere in dictionaries, lists and tuples, to arrays.

    :param stats: Any structure; what is neither tensor nor array stays as it is.
    :param cast: Dtype of the arrays; `None` keeps it.
    :param in_place: See :func:`convert_to_torch`.
    :return: The converted structure. Without a change of the dtype, arrays share the memory of tensors on the CPU.
    :raises TypeError: The structure has a tuple, and `in_place` is true.
    """

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        elif not isinstance(value, np.ndarray):
            return value
        return value if cast is None or value.dtype.kind not in "biufc" else value.astype(cast, copy=False)

    return _convert(stats, leaf, in_place)


def _convert(value: Any, leaf: Callable[[Any], Any], in_place: bool | str) -> Any:
    if isinstance(value, dict):
        converted = {key: _convert(item, leaf, in_place) for key, item in value.items()}
        if in_place:
            value.update(converted)
        return value if in_place else converted
    if isinstance(value, list):
        items = [_convert(item, leaf, in_place) for item in value]
        if in_place:
            value[:] = items
        return value if in_place else items
    if isinstance(value, tuple):
        if in_place is True:
            raise TypeError("A tuple cannot be converted in place; pass `in_place=False` or `in_place='try'`.")
        parts = [_convert(item, leaf, in_place) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return leaf(value)
