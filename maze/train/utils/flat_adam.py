"""Adam over networks whose parameters lie one after the other in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam:
    """Adam with the gradient norms that come for free when a network is one long tensor.

    For networks of the size that control problems need, an optimizer's time goes into starting one operation for each
    small parameter, not into arithmetic. Here the parameters of a network become views of one tensor, their gradients
    views of another, so that a step, a norm or clearing all gradients is a single operation.

    The step itself is torch's fused Adam: making a `torch.optim.Adam` imports torch's compiler, which would add
    1.5 seconds to the start of every training.

    :param networks: Networks by name, in order; parameters shared between them count for the first one.
    :param lr: Learning rate.
    :param eps: Adam's epsilon.
    """

    def __init__(self, networks: Mapping[Any, nn.Module], lr: float, eps: float) -> None:
        self._parameters: dict[Any, list[nn.Parameter]] = {}
        seen: set[int] = set()
        for name, network in networks.items():
            own = [p for p in network.parameters() if p.requires_grad and id(p) not in seen]
            seen.update(map(id, own))
            if own:
                self._parameters[name] = own
        self._flat = {name: _flatten(parameters) for name, parameters in self._parameters.items()}
        self._gradients = {name: torch.zeros_like(flat) for name, flat in self._flat.items()}
        self.lr = lr
        """Learning rate of the next step."""
        self.eps = eps
        self._means = {name: torch.zeros_like(flat) for name, flat in self._flat.items()}
        self._squares = {name: torch.zeros_like(flat) for name, flat in self._flat.items()}
        self._n_steps = {name: torch.zeros((), device=flat.device) for name, flat in self._flat.items()}
        self.tie()

    @property
    def names(self) -> list[Any]:
        """The networks that have parameters of their own."""
        return list(self._flat)

    def tie(self) -> None:
        """Makes parameters and gradients views of the long tensors (again, if somebody has moved or replaced them)."""
        for name, parameters in self._parameters.items():
            offset = 0
            flat, gradient = self._flat[name], self._gradients[name]
            for parameter in parameters:
                rows = slice(offset, offset + parameter.numel())
                offset += parameter.numel()
                view = flat[rows].view_as(parameter)
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter.data)
                    parameter.data = view
                parameter.grad = gradient[rows].view_as(parameter)

    def zero_grad(self) -> None:
        """Clears all gradients."""
        for gradient in self._gradients.values():
            gradient.zero_()

    def gradient_norms(self) -> dict[Any, Tensor]:
        """Euclidean norm of the gradient of each network.

        :return: Scalars `[]` by name.
        """
        return {name: torch.linalg.vector_norm(gradient) for name, gradient in self._gradients.items()}

    def scale_gradients(self, factor: float) -> None:
        """Multiplies all gradients."""
        for gradient in self._gradients.values():
            gradient.mul_(factor)

    def step(self, frozen: Iterable[Any] = ()) -> None:
        """Takes a step with the current gradients.

        :param frozen: Networks that stay exactly as they are.
        """
        left_out = set(frozen)
        names = [name for name in self._flat if name not in left_out]
        if not names:
            return
        n_steps = [self._n_steps[name] for name in names]
        with torch.no_grad():
            # what torch.optim.Adam(fused=True) comes down to, without what it does for each parameter before
            torch._foreach_add_(n_steps, 1)
            torch._fused_adam_(
                [self._flat[name] for name in names],
                [self._gradients[name] for name in names],
                [self._means[name] for name in names],
                [self._squares[name] for name in names],
                [],
                n_steps,
                lr=self.lr,
                beta1=0.9,
                beta2=0.999,
                weight_decay=0.0,
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=None,
                found_inf=None,
            )

    def state_dict(self) -> dict[str, Any]:
        """Moments and step counts by position of the network; loads with `weights_only=True`."""
        return {
            str(index): {
                "mean": self._means[name].clone(),
                "square": self._squares[name].clone(),
                "n_steps": self._n_steps[name].clone(),
            }
            for index, name in enumerate(self._flat)
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a state that :meth:`state_dict` returned, with the current learning rate."""
        for index, name in enumerate(self._flat):
            state = state_dict[str(index)]
            self._means[name].copy_(state["mean"])
            self._squares[name].copy_(state["square"])
            self._n_steps[name].copy_(state["n_steps"])


def _flatten(parameters: list[nn.Parameter]) -> Tensor:
    """A tensor with room for all of the given ones."""
    first = parameters[0]
    for parameter in parameters:
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"The parameters of a network have to be of one type on one device; found {first.dtype} on "
                f"{first.device} and {parameter.dtype} on {parameter.device}."
            )
    size = sum(parameter.numel() for parameter in parameters)
    return torch.zeros(size, dtype=first.dtype, device=first.device)
