"""States as tensors and plain values, which load without running code of the file; helpers for dictionaries of arrays
and for gradients.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Union

import numpy as np
import torch

from maze.core.log_stats.log_stats import LogStatsAggregator
from maze.core.log_stats.reducer_functions import PassedThrough
from maze.core.trajectory_recording.records.spaces_record import stack_dicts
from maze.core.utils.checkpoint import Stateful


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


def mapped(function: Callable[[Any], Any], nested: Any) -> Any:
    """Apply a function to the values in dictionaries, lists and tuples.

    :param function: Called with each value that is no such container.
    :param nested: A value, or containers of values, at any depth.
    :return: The results in new dictionaries and lists of the same structure.
    """
    if isinstance(nested, Mapping):
        return {key: mapped(function, value) for key, value in nested.items()}
    if isinstance(nested, list | tuple):
        return [mapped(function, value) for value in nested]
    return function(nested)


def compute_gradient_norm(params: Iterable[torch.Tensor]) -> float:
    """Return the Euclidean norm of all gradients together; parameters without a gradient count as zero.

    :param params: Of any shape `[...]`.
    """
    return float(torch.nn.utils.get_total_norm(param.grad.detach() for param in params if param.grad is not None))


def stack_torch_dict_list(
    dict_list: Sequence[dict[str, torch.Tensor | np.ndarray]], dim: int = 0
) -> dict[str, torch.Tensor]:
    """Stack dictionaries of tensors or arrays along a new dimension; arrays become tensors.

    :param dict_list: At least one dictionary, all with the same keys and shapes.
    :param dim: Position of the new dimension.
    :raises ValueError: The dictionaries have different keys.
    """
    keys = dict_list[0].keys()
    for index, other in enumerate(dict_list):
        if other.keys() != keys:
            raise ValueError(f"Element 0 has the keys {sorted(keys)}, element {index} has {sorted(other)}.")
    return {key: torch.stack([torch.as_tensor(one[key]) for one in dict_list], dim=dim) for key in keys}


logger = logging.getLogger(__name__)

Part = Union[Stateful, torch.Generator]
"""An object with a state of numbers, arrays and tensors. `load_state_dict` may return sentences about what could not be
restored."""

STATE_FORMAT = "maze_training_state"
"""Key that distinguishes the state of a run from weights; its value is the version of the format."""

_ARRAY, _SCALAR, _PASSED = "__array__", "__scalar__", "__passed__"

_PLAIN = (int, float, str, bool, bytes)

# Smaller arrays are written as bytes: a checkpoint of hundreds of environments has thousands of them, and each tensor
# in it is an entry of the archive, which takes its time.
_MOST_BYTES = 4096


def to_plain(value: Any) -> Any:
    """Replace values of NumPy and Maze by plain values and tensors, at any depth.

    :param value: A value; containers are replaced by new ones, tensors are kept.
    :raises TypeError: A value is not a number, text, array, tensor or container of them.
    """
    plain: Any = value
    if value is None or type(value) in _PLAIN:
        return plain
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        kept: Any = (
            torch.from_numpy(array.copy())
            if not 0 < array.nbytes <= _MOST_BYTES  # the reader takes no empty bytes
            else (array.dtype.str, list(array.shape), array.tobytes())
        )
        plain = {_ARRAY if isinstance(value, np.ndarray) else _SCALAR: kept}
    elif type(value) is PassedThrough:
        plain = {_PASSED: [to_plain(item) for item in value]}
    elif isinstance(value, dict | Mapping):
        plain = {to_plain(key): to_plain(item) for key, item in value.items()}
    elif isinstance(value, tuple):
        plain = tuple(to_plain(item) for item in value)
    elif isinstance(value, list):
        plain = [to_plain(item) for item in value]
    elif not isinstance(value, torch.Tensor):
        raise TypeError(f"a {type(value).__name__} cannot be saved")
    return plain


def from_plain(value: Any) -> Any:
    """Invert :func:`to_plain`; named tuples become tuples."""
    if isinstance(value, dict):
        if len(value) == 1:
            ((kind, content),) = value.items()
            if kind == _ARRAY:
                return _array(content)
            if kind == _SCALAR:
                return _array(content)[()]
            if kind == _PASSED:
                return PassedThrough(from_plain(content))
        return {key: from_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(from_plain(item) for item in value)
    return value


def _array(content: Any) -> np.ndarray:
    """Return an array as :func:`to_plain` wrote it: as bytes, or as a tensor."""
    if isinstance(content, torch.Tensor):
        return np.asarray(content.numpy())
    dtype, shape, values = content
    return np.asarray(np.frombuffer(bytearray(values), dtype).reshape(shape))


def states_of(parts: Mapping[str, Part]) -> dict[str, Any]:
    """Return the states of all parts, as they are saved."""
    return {
        name: part.get_state() if isinstance(part, torch.Generator) else to_plain(part.state_dict())
        for name, part in parts.items()
    }


def load_states(parts: Mapping[str, Part], states: Mapping[str, Any]) -> list[str]:
    """Restore all parts from the result of :func:`states_of`.

    :param parts: Parts by name, which are changed.
    :param states: States by name; those of other names are ignored.
    :raises KeyError: The state of a part is missing.
    :return: Sentences about parts that could not be restored.
    """
    problems: list[str] = []
    for name, part in parts.items():
        if isinstance(part, torch.Generator):
            part.set_state(states[name])
        else:
            reported = part.load_state_dict(from_plain(states[name]))
            if isinstance(reported, Mapping):
                reported = new_episodes(reported)
            problems += reported if isinstance(reported, list) else []  # modules return something else
    return problems


def new_episodes(problems: Mapping[int, str]) -> list[str]:
    """Report which environments begin new episodes.

    :param problems: The reasons by index of the environment.
    """
    by_reason: dict[str, list[str]] = {}
    for index, reason in problems.items():
        by_reason.setdefault(reason, []).append(str(index))
    return [
        f"{'environments' if len(indices) > 1 else 'environment'} {', '.join(indices)} "
        f"{'begin new episodes' if len(indices) > 1 else 'begins a new episode'} ({reason})"
        for reason, indices in by_reason.items()
    ]


def statistics_to_plain(aggregator: LogStatsAggregator) -> dict[str, Any]:
    """Return the collected values of an aggregator as plain values and tensors.

    :param aggregator: The aggregator. Rows with values that cannot be saved are left out, with a warning.
    """
    rows = []
    state = aggregator.state()
    for row in state["rows"]:
        try:
            rows.append(to_plain(row))
        except TypeError as error:  # noqa: PERF203 - rows fail one by one
            logger.warning("Values of the statistic %s are missing in the checkpoint: %s.", row["event"][1], error)
    return {**state, "rows": rows}


def statistics_from_plain(aggregator: LogStatsAggregator, state: Mapping[str, Any]) -> None:
    """Restore an aggregator from the result of :func:`statistics_to_plain`."""
    aggregator.load_state(from_plain(dict(state)))


def global_generators_state() -> dict[str, Any]:
    """Return the state of the global generators of Python, NumPy and torch, which user code may draw from."""
    return {
        "python": random.getstate(),
        "numpy": to_plain(np.random.get_state()),  # noqa: NPY002 (the global generator is the point)
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def set_global_generators_state(state: Mapping[str, Any]) -> None:
    """Continue from a state of :func:`global_generators_state`.

    :param state: The state. States of CUDA devices are ignored where the number of devices differs.
    """
    random.setstate(state["python"])
    np.random.set_state(from_plain(state["numpy"]))  # noqa: NPY002 (the global generator is the point)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
