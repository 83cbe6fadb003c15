"""Networks by key: observations in, weights in and out."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from maze.core.errors import CheckpointError, ConfigError


def as_float_tensors(observation: Mapping[str, Any], device: str) -> dict[str, torch.Tensor]:
    """Return network inputs: tensors of torch's default floating type on `device`, copied only where necessary.

    Integer and boolean observations become floating numbers too; a network with an index embedding casts back.

    :param observation: Arrays or tensors `[..., *space.shape]` by key; the shapes stay.
    """
    dtype = torch.get_default_dtype()
    tensors: dict[str, torch.Tensor] = {}
    for key, value in observation.items():
        tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        if tensor.dtype is not dtype or str(tensor.device) != device:
            tensor = tensor.to(device=device, dtype=dtype)
        tensors[key] = tensor
    return tensors


def check_networks(networks: Any, what: str) -> dict[Any, nn.Module]:
    """Return a plain dictionary of the networks, all of which are modules.

    :raises ConfigError: There are none, or one is not a module.
    """
    if not isinstance(networks, Mapping) or not networks:
        raise ConfigError(f"{what}: expected a mapping from step keys to networks, found {networks!r}.")
    for key, network in networks.items():
        if not isinstance(network, nn.Module):
            raise ConfigError(f"{what}[{key!r}]: expected a torch.nn.Module, found {type(network).__name__}.")
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
        if key in saved:
            problems += _tensor_problems(key, network.state_dict(), saved[key])
    if problems:
        raise CheckpointError(
            f"The weights in `{group}` do not fit the model: {'; '.join(problems)}. "
            "Build the model with the configuration that the weights were saved with."
        )


class TargetNetworks:
    """Networks that follow others, which are the targets that those learn to predict.

    Parameters move towards those that they follow (Polyak averaging, Lillicrap et al. 2016; all the way is the hard
    update of Mnih et al. 2015). Buffers, such as running statistics, masks and counters, are copied: they are no
    outcome of gradients that would need slowing down, and averages of some of them (infinite masks, counters) are none.

    :param targets: The networks that follow; they get no gradients.
    :param sources: The networks that are followed, in the same order.
    """

    def __init__(self, targets: Iterable[nn.Module], sources: Iterable[nn.Module]) -> None:
        targets, sources = list(targets), list(sources)
        self._networks = targets
        self._targets: list[torch.Tensor] = [p for each in targets for p in each.parameters()]
        self._sources: list[torch.Tensor] = [p for each in sources for p in each.parameters()]
        buffers = ([buffer for each in part for buffer in each.buffers()] for part in (targets, sources))
        self._buffers = list(zip(*buffers, strict=True))

    @torch.no_grad()
    def update(self, tau: float) -> None:
        """Move the targets: `target <- (1 - tau) * target + tau * source`.

        :param tau: 0: parameters stay, 1: they become those that are followed.
        """
        torch._foreach_lerp_(self._targets, self._sources, tau)
        for target, source in self._buffers:
            target.copy_(source)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights of the targets, for algorithms whose model does not contain them."""
        return {str(index): dict(network.state_dict()) for index, network in enumerate(self._networks)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from weights that :meth:`state_dict` gave."""
        for index, network in enumerate(self._networks):
            network.load_state_dict(state_dict[str(index)])


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


def _tensor_problems(key: Hashable, expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    problems = [f"{key!r}: `{name}` is missing" for name in expected if name not in found]
    problems += [f"{key!r}: `{name}` is left over" for name in found if name not in expected]
    for name, tensor in expected.items():
        other = found.get(name)
        if isinstance(tensor, torch.Tensor) and isinstance(other, torch.Tensor) and tensor.shape != other.shape:
            problems.append(f"{key!r}: `{name}` is {tuple(other.shape)}, the model has {tuple(tensor.shape)}")
    return problems
