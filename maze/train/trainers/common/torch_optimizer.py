"""Optimizers of torch for the gradient step of the learning kit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from maze.train.trainers.common.learning import Name


class TorchOptimizer:
    """An optimizer of torch, of any kind, with the methods of :class:`~maze.core.agent.flat_adam.FlatAdam`.

    :param optimizer: The optimizer.
    :param networks: The networks whose gradients are looked at, all of whose parameters it has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, networks: Mapping[Name, nn.Module]) -> None:
        self._optimizer = optimizer
        self._parameters = {name: list(network.parameters()) for name, network in networks.items()}
        self._device = optimizer.param_groups[0]["params"][0].device

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def gradient_norms(self) -> dict[Name, Tensor]:
        return {
            name: nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).to(self._device)
            for name, parameters in self._parameters.items()
        }

    def scale_gradients(self, factor: float) -> None:
        for parameter in self._with_gradients(self._parameters):
            parameter.grad.mul_(factor)  # type: ignore[union-attr]  # those that have one

    def step(self, frozen: Iterable[Name] = ()) -> None:
        for parameter in self._with_gradients(frozen):
            parameter.grad = None  # optimizers leave out what has none
        self._optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, and of which kind it is."""
        return {"type": type_name(self._optimizer), "state": self._optimizer.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned, with the configured learning rate and the like."""
        configured = [{**group} for group in self._optimizer.param_groups]
        self._optimizer.load_state_dict(dict(state_dict["state"]))
        for group, wanted in zip(self._optimizer.param_groups, configured, strict=True):
            group.update({name: value for name, value in wanted.items() if name != "params"})

    def _with_gradients(self, names: Iterable[Name]) -> Iterable[nn.Parameter]:
        parameters = {id(p): p for name in names for p in self._parameters[name]}
        return [p for p in parameters.values() if p.grad is not None]


def type_name(instance: object) -> str:
    """Module and name of an object's class."""
    return f"{type(instance).__module__}.{type(instance).__qualname__}"
