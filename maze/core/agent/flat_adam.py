"""Adam over networks with contiguous parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class FlatAdam:
    """Adam over networks whose parameters are contiguous in memory.

    For small networks, an optimizer spends its time on starting one operation for each parameter, not on arithmetic.
    Here the parameters of a network become views of one tensor, their gradients views of another, so that a step, a
    norm or clearing all gradients is a single operation.

    The step itself is torch's fused Adam. Making a `torch.optim.Adam` imports torch's compiler, which takes 1.5
    seconds.

    :param networks: Networks by name, in order; parameters shared between them count for the first one.
    :param lr: Learning rate.
    :param eps: Adam's epsilon.
    """

    def __init__(self, networks: Mapping[Any, nn.Module], lr: float, eps: float) -> None:
        self.lr = lr
        """Learning rate of the next step."""
        self.eps = eps
        self._networks: dict[Any, _FlatNetwork] = {}
        seen: set[int] = set()
        for name, network in networks.items():
            own = [p for p in network.parameters() if p.requires_grad and id(p) not in seen]
            seen.update(map(id, own))
            if own:
                self._networks[name] = _FlatNetwork(own)
        self.tie()

    def tie(self) -> None:
        """Make parameters and gradients views of the long tensors (again, if they were moved or replaced)."""
        for network in self._networks.values():
            network.tie()

    def zero_grad(self) -> None:
        """Clear all gradients."""
        for network in self._networks.values():
            network.gradient.zero_()

    def gradient_norms(self) -> dict[Any, Tensor]:
        """Return the Euclidean norm of the gradient of each network, scalars `[]`."""
        return {name: torch.linalg.vector_norm(network.gradient) for name, network in self._networks.items()}

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        for network in self._networks.values():
            network.gradient.mul_(factor)

    @torch.no_grad()
    def step(self, frozen: Iterable[Any] = ()) -> None:
        """Take a step with all networks that are not frozen.

        :param frozen: Networks that stay unchanged.
        """
        left_out = set(frozen)
        moved = [network for name, network in self._networks.items() if name not in left_out]
        if not moved:
            return
        n_steps = [network.n_steps for network in moved]
        # what torch.optim.Adam(fused=True) comes down to, without its per-parameter checks
        torch._foreach_add_(n_steps, 1)
        torch._fused_adam_(
            [network.values for network in moved],
            [network.gradient for network in moved],
            [network.mean for network in moved],
            [network.square for network in moved],
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
        """Return moments and step counts by name of the network; loads with `weights_only=True`."""
        return {
            str(key): {name: getattr(network, name).clone() for name in _ADAM_STATE}
            for key, network in self._networks.items()
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned, with the current learning rate.

        :param state_dict: The state; networks that it has in addition are ignored.
        """
        for key, network in self._networks.items():
            for name in _ADAM_STATE:
                getattr(network, name).copy_(state_dict[str(key)][name])


_ADAM_STATE = ("mean", "square", "n_steps")


class _FlatNetwork:
    """Parameters of a network in one tensor, their gradients in another, and what Adam keeps of them."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        self.parameters = parameters
        size = sum(parameter.numel() for parameter in parameters)
        self.values, self.gradient, self.mean, self.square = (
            torch.zeros(size, dtype=first.dtype, device=first.device) for _ in range(4)
        )
        self.n_steps = torch.zeros((), device=first.device)

    def tie(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = zip(self.parameters, torch.split(self.values, sizes), torch.split(self.gradient, sizes), strict=True)
        for parameter, values, gradient in parts:
            view = values.view_as(parameter)
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter.data)
                parameter.data = view
            parameter.grad = gradient.view_as(parameter)
