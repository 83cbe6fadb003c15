"""Copies of the learner's policy in other processes, and the transfer of its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from maze.core.agent.torch_policy import TorchPolicy
from maze.core.utils.update_profile import TRANSFER, timed
from maze.core.utils.worker_pool import map_memory

T = TypeVar("T")


class SharedPolicyWeights:
    """Shared memory with the latest versions of a policy's weights, each in a slot of its own.

    The slot of a version is overwritten `n_slots` versions later. No lock is taken: readers have to finish before.

    :param state_dict: Weights of the policy; they determine the size of a slot.
    :param n_slots: Number of versions kept.
    :param fd: Memory of another process; `None`: create new memory.
    """

    def __init__(self, state_dict: Mapping[str, Any], n_slots: int, fd: int | None = None) -> None:
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(state_dict))
        self.memory = map_memory(n_bytes * n_slots, fd)
        """Its file descriptor gives another process access."""
        self._slots: np.ndarray = np.ndarray((n_slots, n_bytes), np.uint8, buffer=self.memory.map)

    @timed(TRANSFER)
    def write(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Store a version.

        :param version: Its number.
        :param state_dict: Its weights, on any device.
        """
        self._slots[version % len(self._slots)] = packed_weights(state_dict)

    def read(self, version: int, state_dict: Mapping[str, Any]) -> None:
        """Copy a version into live tensors.

        :param version: Its number.
        :param state_dict: The tensors to overwrite.
        """
        unpack_weights(self._slots[version % len(self._slots)], state_dict)


def tensors_of(state_dict: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    """Yield all tensors of a nested state dictionary, in its order, each in its own shape `[...]`."""
    for value in state_dict.values():
        if isinstance(value, Mapping):
            yield from tensors_of(value)
        else:
            yield value


class MadeOnce(Generic[T]):
    """Cache of a value made from an object, until another object is given."""

    def __init__(self) -> None:
        self._value: Any = None
        self._made: Any = None
        self.n_made = 0
        """Number of values made so far, which identifies the current one."""

    def of(self, value: Any, make: Callable[[], T]) -> T:
        """Return the value of an object.

        :param value: The object.
        :param make: Makes the value of a new object.
        """
        if value is not self._value:
            self._value, self._made = value, make()
            self.n_made += 1
        made: T = self._made
        return made


def copied_to_cpu(policy: TorchPolicy) -> TorchPolicy:
    """Return a copy of a policy on the CPU that acts in evaluation mode."""
    portable = copy.deepcopy(policy)
    portable.to("cpu")
    portable.eval()
    return portable


def packed_weights(state_dict: Mapping[Any, Any]) -> np.ndarray:
    """Return all weights as one flat array, uint8 `[n_bytes]`, the fastest form for transfers between machines."""
    rows = [
        tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for tensor in tensors_of(state_dict)
    ]
    return np.concatenate(rows) if rows else np.zeros(0, np.uint8)


def unpack_weights(packed: np.ndarray, state_dict: Mapping[Any, Any]) -> None:
    """Copy the result of :func:`packed_weights` into live tensors.

    :param packed: Weights, uint8 `[n_bytes]`; not modified.
    :param state_dict: The tensors to overwrite.
    """
    offset = 0
    for target in tensors_of(state_dict):
        n_bytes = target.numel() * target.element_size()
        source = torch.from_numpy(packed[offset : offset + n_bytes].copy())
        target.copy_(source.view(target.dtype).view(target.shape))
        offset += n_bytes
