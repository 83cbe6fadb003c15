"""Record of one sub-step: observation, action, reward."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import numpy as np

from maze.core.env.structured_env import ActorID

if TYPE_CHECKING:
    import torch

    Array = Union[np.ndarray, torch.Tensor]


PROPENSITY = "propensity"
"""Key of `info` with the probability (density) of the joint action under the policy that acted."""
ACTED_BY = "policy"
"""Key of `info` with the name of the policy that acted."""
_DICT_FIELDS = ("observation", "action", "next_observation", "logits")
_VALUE_FIELDS = ("reward", "done", "discounted_return")


@dataclass
class SpacesRecord:
    """Observation, action and reward of one actor in one sub-step, as values of the gymnasium spaces.

    The fields hold single values, or batches: arrays with the leading dimensions `batch_shape`. Fields that were not
    recorded are `None`.

    :param observation: The actor's observation before the action, `[*batch_shape, *space.shape]` by key.
    :param action: Its action, `[*batch_shape, *space.shape]` by action head.
    :param reward: Reward of the sub-step, `[*batch_shape]`.
    :param done: Whether the episode ended with the sub-step, terminated or truncated, `[*batch_shape]`.
    :param discounted_return: Discounted return, `[*batch_shape]`, which Maze leaves to the user.
    """

    actor_id: ActorID
    """The actor."""

    observation: dict[str, Array] | None = None
    action: dict[str, Array] | None = None
    reward: float | Array | None = None
    done: bool | Array | None = None

    info: Any = None
    """The info dictionary of the step; for batches a list of them."""

    next_observation: dict[str, Array] | None = None
    """The observation after the action; at the end of an episode its last observation."""

    logits: dict[str, Array] | None = None
    """Outputs of the policy's networks for each action head: the parameters of its distribution."""

    discounted_return: float | Array | None = None

    batch_shape: list[int] | None = None
    """Leading dimensions of all arrays; `None`: a single, unbatched record."""

    @classmethod
    def stack(cls, records: Sequence[SpacesRecord]) -> SpacesRecord:
        """Stack records of the same actor along a new first dimension.

        :param records: At least one record; each field must be present in all of them or in none.
        :raises ValueError: There are none, or they are of different actors or batch shapes.
        """
        if not records:
            raise ValueError("There are no records to stack.")
        first = records[0]
        for index, record in enumerate(records):
            if (record.actor_id, record.batch_shape) != (first.actor_id, first.batch_shape):
                raise ValueError(
                    f"Only records of one actor and one batch shape can be stacked: record 0 is of {first.actor_id}, "
                    f"{first.batch_shape}, record {index} of {record.actor_id}, {record.batch_shape}."
                )
        stacked = cls(actor_id=first.actor_id, batch_shape=[len(records), *(first.batch_shape or [])])
        for field in (*_DICT_FIELDS, *_VALUE_FIELDS, "info"):
            values: list[Any] = [getattr(record, field) for record in records]
            missing = [index for index, value in enumerate(values) if value is None]
            if len(missing) == len(values):
                continue
            if missing:
                raise ValueError(f"Cannot stack `{field}`: records {missing[:8]} of {len(values)} lack it.")
            if field in _DICT_FIELDS:
                setattr(stacked, field, stack_dicts(values, name=f"`{field}` of {first.actor_id}"))
            else:
                setattr(stacked, field, values if field == "info" else stack_values(values))
        return stacked

    @property
    def substep_key(self) -> str | int:
        """Key of the sub-step, and of its policy."""
        return self.actor_id.step_key

    @property
    def agent_id(self) -> int:
        """Number of the agent in the sub-step."""
        return self.actor_id.agent_id

    def to_numpy(self) -> SpacesRecord:
        """Convert all fields to NumPy arrays, in place.

        :return: This record.
        """
        for field in (*_DICT_FIELDS, *_VALUE_FIELDS):
            setattr(self, field, to_numpy(getattr(self, field)))
        return self

    def to_torch(self, device: str) -> SpacesRecord:
        """Convert all fields to tensors, in place; see :func:`to_torch`.

        :param device: Device of the tensors; on the CPU they share the memory of writeable arrays.
        :return: This record.
        """
        for field in (*_DICT_FIELDS, *_VALUE_FIELDS):
            setattr(self, field, to_torch(getattr(self, field), device))
        return self


def is_tensor(value: Any) -> bool:
    """Return whether a value is a torch tensor, without importing torch."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def stack_values(values: Sequence[Any]) -> Any:
    """Stack arrays, tensors or numbers along a new first axis; dtypes are kept, Python floats become float32.

    :param values: At least one value, all of the same kind and shape.
    """
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
    :param name: Name of the dictionaries, for the error message.
    :raises ValueError: The dictionaries have different keys.
    """
    keys = dicts[0].keys()
    for index, other in enumerate(dicts):
        if other.keys() != keys:
            raise ValueError(
                f"Cannot stack {name}: element 0 has the keys {sorted(keys)}, element {index} has {sorted(other)}."
            )
    return {key: stack_values([one[key] for one in dicts]) for key in keys}


def to_numpy(value: Any) -> Any:
    """Convert tensors to arrays, which share memory with tensors on the CPU.

    :param value: A tensor, a list of numbers, or a dictionary of these, which is converted per key; anything else is
        kept.
    """
    if isinstance(value, dict):
        return {key: to_numpy(item) for key, item in value.items()}
    if is_tensor(value):
        return value.detach().cpu().numpy()
    return np.asarray(value) if isinstance(value, (list, tuple)) else value


def to_torch(value: Any, device: str) -> Any:
    """Convert arrays and numbers to tensors; dtypes of arrays are kept, single floating-point numbers become float32.

    :param value: An array, a number, a tensor, or a dictionary of these, which is converted per key; `None` is kept.
    :param device: Device of the tensors. On the CPU they share the memory of writeable arrays.
    """
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: to_torch(item, device) for key, item in value.items()}
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, np.ndarray):
        # torch warns about read-only arrays
        return torch.from_numpy(value if value.flags.writeable else value.copy()).to(device)
    if isinstance(value, (float, np.floating)):
        return torch.tensor(float(value), dtype=torch.float32, device=device)
    return torch.as_tensor(value, device=device)
