"""Common base of policies, critics and actor-critics that hold torch networks."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from maze.core.errors import ConfigError

logger = logging.getLogger(__name__)


def resolve_device(device: str) -> str:
    """The device to use: `cuda` becomes `cpu`, with a notice, on a machine without a CUDA device.

    :raises ConfigError: The device is unknown to torch or cannot be used here.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: {device!r} is not a device that torch knows. Try `cpu` or `cuda`.") from error
    if parsed.type == "cuda" and not torch.cuda.is_available():
        logger.warning("device: %s was asked for, but there is no CUDA device on this machine; using cpu.", device)
        return "cpu"
    if parsed.type != "cpu":
        try:
            torch.empty(0, device=parsed)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ConfigError(f"device: {device!r} cannot be used on this machine: {error}") from error
    return str(device)


def unique_parameters(networks: Iterable[nn.Module]) -> list[torch.Tensor]:
    """Parameters of all networks, each one once although networks may share modules.

    :return: Each with the shape that it has in its network, `[...]`.
    """
    seen: dict[int, torch.Tensor] = {}
    for network in networks:
        for parameter in network.parameters():
            seen.setdefault(id(parameter), parameter)
    return list(seen.values())


class TorchModel(ABC):
    """Holds torch networks without being an `nn.Module` itself.

    :param device: Device of the networks, e.g. `cpu` or `cuda`.
    """

    def __init__(self, device: str) -> None:
        self._device = resolve_device(device)

    @property
    def num_params(self) -> int:
        """Number of scalar parameters."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def device(self) -> str:
        """Device that the networks are on."""
        return self._device

    @abstractmethod
    def parameters(self) -> list[torch.Tensor]:
        """All parameters, each one once.

        :return: Each with the shape that it has in its network, `[...]`.
        """

    @abstractmethod
    def eval(self) -> None:
        """Switches dropout, batch normalisation and the like to evaluation."""

    @abstractmethod
    def train(self) -> None:
        """Switches dropout, batch normalisation and the like to training."""

    @abstractmethod
    def to(self, device: str) -> None:
        """Moves the networks, in place."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Weights of all networks; loads with `torch.load(..., weights_only=True)`."""

    @abstractmethod
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies weights into the networks; nothing changes when they do not fit.

        :raises CheckpointError: Networks or tensors are missing, left over or of other shapes.
        """
