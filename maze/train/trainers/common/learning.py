"""What every algorithm that follows gradients needs: losses, and the gradient step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maze.core.agent.flat_adam import FlatAdam
from maze.core.errors import NonFiniteError


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


Key = Any
"""What a number belongs to: a sub-step, a critic, an action head."""
Terms = list[tuple[Key, Tensor]]
"""Scalars, each with what it belongs to; several of one key are averaged when they are logged."""
Name = tuple[str, Key]
"""A network to an optimizer: the event that reports the norm of its gradient, and what it belongs to."""


@dataclass
class Losses:
    """What a gradient step makes small, and the numbers to report about it.

    An algorithm derives a dataclass of its own. Each further field is named like the event that reports it, and holds a
    scalar, or :data:`Terms` for an event with a group (`define_stats_grouping`). Nothing of it needs detaching.
    """

    total: Tensor
    """The objective, a scalar with gradients."""

    def add(self, value: Tensor, weight: float = 1.0) -> None:
        """Adds a term to the total; one without weight is left out, so that nothing is computed for it.

        :param value: A scalar `[]`.
        """
        if weight:
            self.total = torch.add(self.total, value, alpha=weight)

    def terms(self) -> Iterator[tuple[str, Key | None, Tensor]]:
        """Event, group (`None`: the event has none) and value of all numbers but the total.

        Values are scalars `[]`.
        """
        for event, value in vars(self).items():
            if event == "total":
                continue
            if isinstance(value, Tensor):
                yield event, None, value
            else:
                for key, entry in value:
                    yield event, key, entry


def gradient_step(
    losses: Losses,
    optimizer: FlatAdam | TorchOptimizer,
    max_grad_norm: float = 0.0,
    *,
    inputs: Sequence[Tensor] | None = None,
    frozen: Iterable[Name] = (),
) -> dict[Name, Tensor]:
    """Follows the gradient of the total, unless anything in it is not finite.

    :param losses: The losses.
    :param optimizer: Has the parameters.
    :param max_grad_norm: The gradient of all networks together is scaled down to this norm; 0 leaves it alone.
    :param inputs: Parameters that get gradients; `None`: all that the total depends on.
    :param frozen: Networks that stay as they are; their gradients count for the norm.
    :return: Norm of the gradient of each network before it was scaled, scalars `[]`, to be reported with the losses.
    :raises NonFiniteError: The total or a gradient is not finite; names the first loss, or the network. No parameter
        was changed.
    """
    optimizer.zero_grad()
    if losses.total.requires_grad and (inputs is None or inputs):
        losses.total.backward(inputs=inputs)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    norms = optimizer.gradient_norms()
    loss = losses.total.detach()
    norm, total = torch.stack([_joint_norm(list(norms.values()), loss), loss]).tolist()
    if not (math.isfinite(norm) and math.isfinite(total)):
        raise NonFiniteError(_describe_non_finite(losses, total, norms))
    if 0.0 < max_grad_norm < norm:
        optimizer.scale_gradients(max_grad_norm / norm)
    optimizer.step(frozen=frozen)
    return norms


def mean_of(values: Tensor, weight: Tensor | None) -> Tensor:
    """Mean of the elements of weight 1; 0 if there are none. Elements of weight 0 need not be finite.

    :param values: `[batch]`, as the weight.
    """
    if weight is None:
        return values.mean()
    return values.masked_fill(weight == 0.0, 0.0).sum() / weight.sum().clamp(min=1.0)


def _joint_norm(norms: list[Tensor], like: Tensor) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros_like(like)


def _describe_non_finite(losses: Losses, total: float, norms: Mapping[Name, Tensor]) -> str:
    explained = "the step was not applied. Look for extreme rewards or observations, or lower the learning rate."
    for event, key, tensor in losses.terms():
        if "loss" in event and not math.isfinite(value := tensor.item()):
            return f"{event}{_belonging(event, key)} is {value}; {explained}"
    if not math.isfinite(total):
        return f"the loss is {total}; {explained}"
    for (event, key), norm in norms.items():
        if not math.isfinite(norm.item()):
            name = event.removesuffix("_grad_norm")
            return f"the gradient of the {name} network{_belonging(event, key)} is not finite; {explained}"
    return f"the norm of all gradients together is not finite; {explained}"


def _belonging(event: str, key: Key | None) -> str:
    return "" if key is None else f" of {'critic' if event.startswith('critic') else 'sub-step'} {key!r}"
