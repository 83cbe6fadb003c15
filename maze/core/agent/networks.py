"""Torch networks: their device, threads, parameters, weights and modes."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from maze.core.errors import CheckpointError, ConfigError

logger = logging.getLogger(__name__)

SMALL_LAYER = 256 * 256
"""Largest number of weights of a layer for which one thread is used."""


def resolve_device(device: str, key: str = "device", default: str = "") -> str:
    """Return the device if it can be used.

    :param device: Its name.
    :param key: Where it is configured, for messages.
    :param default: The device of a configuration that names none: if it is `cuda`, a machine without a CUDA device
        uses the CPU instead, with a notice.
    :raises ConfigError: The device is unknown to torch or cannot be used here.
    """
    try:
        parsed = torch.device(device)
        if device == default and parsed.type == "cuda" and not torch.cuda.is_available():
            logger.warning("%s: the default %s needs a CUDA device, which was not found; using cpu.", key, device)
            return "cpu"
        torch.empty(0, device=parsed)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(
            f"{key}: {device!r} cannot be used on this machine: {error} Expected a device of torch {torch.__version__} "
            "that is there, such as `cpu` or `cuda`."
        ) from error
    return str(device)


def unique_parameters(networks: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Return parameters of all networks, each one once although networks may share modules.

    :return: Each with the shape that it has in its network, `[...]`.
    """
    seen: dict[int, torch.Tensor] = {}
    for network in networks:
        for parameter in network.parameters():
            seen.setdefault(id(parameter), parameter)
    return list(seen.values())


@contextmanager
def threads_for(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Limit torch to one thread while networks of small dense layers learn.

    Threads wait for each other actively: on a machine with other work, several of them multiply the CPU time. Networks
    with convolutions or larger layers keep their threads, and so do processes with the environment variable
    `OMP_NUM_THREADS`.

    :param parameters: Parameters of the networks, each `[...]`.
    """
    is_small = all(parameter.ndim <= 2 and parameter.numel() <= SMALL_LAYER for parameter in parameters)
    if not is_small or "OMP_NUM_THREADS" in os.environ:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_networks(networks: Any, what: str) -> dict[Any, nn.Module]:
    """Return a plain dictionary of the networks, all of which are modules.

    :raises ConfigError: There are none, or one is not a module.
    """
    is_mapping = isinstance(networks, Mapping) and bool(networks)
    if not is_mapping or not all(isinstance(network, nn.Module) for network in networks.values()):
        raise ConfigError(f"{what}: expected a mapping from step keys to torch.nn.Modules, found {networks!r}.")
    return dict(networks)


def network_weights(networks: Mapping[Any, nn.Module]) -> dict[Any, dict[str, torch.Tensor]]:
    """Return the state dictionaries of all networks by their keys (references to the live tensors, as torch's own)."""
    return {key: dict(network.state_dict()) for key, network in networks.items()}


def load_network_weights(networks: Mapping[Any, nn.Module], state: Mapping[str, Any], group: str) -> None:
    """Copy `state[group]` into the networks, in place, after all of it was found to fit."""
    check_network_weights(networks, state, group)
    for key, network in networks.items():
        network.load_state_dict(state[group][key])


def check_network_weights(networks: Mapping[Any, nn.Module], state: Any, group: str) -> None:
    """Compare the saved weights with the networks, and touch nothing.

    :raises CheckpointError: Lists every network and tensor that is missing, left over or of another shape.
    """
    if not isinstance(state, Mapping) or group not in state:
        found = ", ".join(sorted(map(str, state))) if isinstance(state, Mapping) else type(state).__name__
        raise CheckpointError(f"The state dictionary has no `{group}`; found: {found or 'nothing'}.")
    saved = state[group]
    problems = [f"network {key!r} is missing" for key in networks if key not in saved]
    problems += [f"network {key!r} is left over" for key in saved if key not in networks]
    for key, network in networks.items():
        expected, found = network.state_dict(), saved.get(key, {})
        if key in saved:
            problems += [f"{key!r}: `{name}` is missing" for name in expected if name not in found]
            problems += [f"{key!r}: `{name}` is left over" for name in found if name not in expected]
        for name, tensor in expected.items():
            other = found.get(name, tensor)
            if isinstance(other, torch.Tensor) and tensor.shape != other.shape:
                problems.append(f"{key!r}: `{name}` is {tuple(other.shape)}, the model has {tuple(tensor.shape)}")
    if problems:
        raise CheckpointError(
            f"The weights in `{group}` do not fit the model: {'; '.join(problems)}. "
            "Build the model with the configuration that the weights were saved with."
        )


_DEPEND_ON_MODE = (nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.RReLU)
_MODULES_THAT_DEPEND_ON_MODE = {f"torch.nn.modules.{name}" for name in ("batchnorm", "instancenorm", "dropout")}


def depends_on_mode(networks: Iterable[nn.Module]) -> bool:
    """Return whether outputs of networks may differ between training and evaluation mode.

    :param networks: Their modules outside torch and Maze are assumed to use the mode.
    """
    return any(
        isinstance(module, _DEPEND_ON_MODE)
        or not type(module).__module__.startswith(("torch.nn.", "maze.perception."))
        or any(base.__module__ in _MODULES_THAT_DEPEND_ON_MODE for base in type(module).__mro__)
        for network in networks
        for module in network.modules()
    )
