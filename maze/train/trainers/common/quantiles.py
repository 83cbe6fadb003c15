"""Distributions of returns as quantiles (Dabney et al. 2018, Distributional reinforcement learning with quantile
regression): the loss and the networks.

Quantile `i` of `n` has the probability `(i + 0.5) / n`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from maze.core.errors import ConfigError


def quantile_huber_loss(quantiles: Tensor, targets: Tensor, kappa: float = 1.0) -> Tensor:
    """Return the quantile Huber loss (Dabney et al. 2018, equation 10), averaged over quantiles and samples.

    The average over quantiles, not the paper's sum, makes its size independent of their number.

    :param quantiles: Predicted quantiles in ascending order, `[..., n_quantiles]`.
    :param targets: Samples of the distribution, `[..., n_samples]`.
    :param kappa: Half-width of the quadratic part; 0: the quantile regression loss.
    :return: `[...]`.
    """
    n_quantiles = quantiles.shape[-1]
    levels = (torch.arange(n_quantiles, dtype=quantiles.dtype, device=quantiles.device) + 0.5) / n_quantiles
    error = targets.unsqueeze(-2) - quantiles.unsqueeze(-1)
    size = error.abs()
    if kappa > 0.0:
        quadratic = size.clamp(max=kappa)
        size = quadratic * (size - 0.5 * quadratic) / kappa
    weight = (levels.unsqueeze(-1) - (error.detach() < 0.0).to(levels)).abs()
    loss: Tensor = (weight * size).mean((-2, -1))
    return loss


def output_layer(network: nn.Module, sizes: Sequence[int]) -> nn.Linear | None:
    """Return the last linear layer with one of the output sizes; `None`: there is none."""
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.out_features in sizes]
    return layers[-1] if layers else None


def no_output_layer(what: str) -> ConfigError:
    """Return the error for a network without an output layer.

    :param what: Name of the network.
    """
    return ConfigError(
        f"algorithm.risk: expected a linear layer (torch.nn.Linear) at the end of {what}, beside which quantiles are "
        "predicted; found none with its number of outputs."
    )


def widen(network: nn.Module, n_quantiles: int, what: str) -> None:
    """Replace the output layer of a network of values by one that predicts quantiles.

    :param network: The network; it is changed.
    :param n_quantiles: Number of quantiles.
    :param what: Name of the network in messages.
    :raises ConfigError: The network does not end with a linear layer.
    """
    layer = output_layer(network, (1,))
    if layer is None:
        raise no_output_layer(what)
    wide = nn.Linear(layer.in_features, n_quantiles).to(layer.weight.device)
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if child is layer:
                setattr(module, name, wide)


class QuantileHead(nn.Module):
    """Quantiles of the outputs of a network, beside its output layer and from the same features.

    :param layer: The output layer, with `n_outputs` outputs, or with one for each item of a set.
    :param n_outputs: Number of outputs of the network.
    :param n_quantiles: Number of quantiles of each output.
    """

    def __init__(self, layer: nn.Linear, n_outputs: int, n_quantiles: int) -> None:
        super().__init__()
        self._layer = (layer,)  # a tuple: its parameters are the network's
        self._shape = (n_outputs, n_quantiles)
        self._features: list[Tensor] = []
        self.net = nn.Linear(layer.in_features, layer.out_features * n_quantiles).to(layer.weight.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context in which the network is evaluated before the head."""
        (layer,) = self._layer
        self._features.clear()
        hook = layer.register_forward_pre_hook(lambda _, given: self._features.append(given[0]))
        try:
            yield
        finally:
            hook.remove()

    def forward(self) -> Tensor:
        """Return the quantiles of the latest evaluation, `[B, n_outputs, n_quantiles]`."""
        quantiles: Tensor = self.net(self._features[-1])
        return quantiles.reshape(-1, *self._shape)
