"""Stacking and converting dictionaries of arrays; torch is only touched when a tensor or a conversion asks for it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


def is_tensor(value: Any) -> bool:
    """Whether this is a torch tensor; never imports torch (without it nothing can be a tensor)."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def stack_values(values: Sequence[Any]) -> Any:
    """Stack arrays, tensors or numbers along a new first axis; dtypes are kept, Python floats become float32."""
    first = values[0]
    if is_tensor(first):
        import torch

        return torch.stack(list(values))
    if type(first) is float:
        return np.asarray(values, dtype=np.float32)
    return np.stack([np.asarray(value) for value in values])


def stack_dicts(dicts: Sequence[dict[str, Any]], name: str = "dictionaries") -> dict[str, Any]:
    """Stack per key, in the key order of the first dictionary.

    :param dicts: Dictionaries with the same keys.
    :param name: What is stacked, for the error message.
    """
    keys = dicts[0].keys()
    for index, other in enumerate(dicts):
        if other.keys() != keys:
            raise ValueError(
                f"Cannot stack {name}: element 0 has the keys {sorted(keys)}, element {index} has {sorted(other)}."
            )
    return {key: stack_values([one[key] for one in dicts]) for key in keys}


def to_numpy(value: Any) -> Any:
    """Tensors become arrays (sharing memory where they can), dictionaries are converted per key, None stays None."""
    if isinstance(value, dict):
        return {key: to_numpy(item) for key, item in value.items()}
    if is_tensor(value):
        return value.detach().cpu().numpy()
    if isinstance(value, (list, tuple)):
        return np.asarray(value)
    return value


def to_torch(value: Any, device: str) -> Any:
    """Arrays and numbers become tensors on the device (sharing memory where they can); None stays None."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: to_torch(item, device) for key, item in value.items()}
    return _tensor(value, device)


def _tensor(value: Any, device: str) -> torch.Tensor:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, np.ndarray):
        # torch warns about (and might write to) arrays that are marked as read-only
        return torch.from_numpy(value if value.flags.writeable else value.copy()).to(device)
    if isinstance(value, (float, np.floating)):
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    return torch.as_tensor(value, device=device)
