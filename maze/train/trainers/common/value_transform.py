"""Transformations of values that spread over orders of magnitude, and distributions of returns as quantiles (Dabney et
al. 2018, Distributional reinforcement learning with quantile regression).

Quantile `i` of `n` has the probability `(i + 0.5) / n`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from maze.core.annotations import override
from maze.core.errors import ConfigError

ValueType = TypeVar("ValueType", float, np.ndarray, torch.Tensor)


class ValueTransform(ABC):
    """An invertible transformation of values."""

    @abstractmethod
    def transform_value(self, x: ValueType) -> ValueType:
        """Transform values, element by element."""

    @abstractmethod
    def transform_value_inv(self, x: ValueType) -> ValueType:
        """Return the inverse of :meth:`transform_value`."""


class ReduceScaleValueTransform(ValueTransform):
    """Compress large values like a square root: `sign(x) * (sqrt(|x| + 1) - 1) + epsilon * x`.

    Pohlen et al. 2018, "Observe and Look Further", proposition A.2.

    :param epsilon: Weight of the linear part, which keeps the inverse Lipschitz continuous; 0 is allowed.
    :raises ValueError: `epsilon` is negative.
    """

    def __init__(self, epsilon: float) -> None:
        if epsilon < 0:
            raise ValueError(f"`epsilon` must not be negative, found {epsilon}.")
        self.epsilon = epsilon

    @override(ValueTransform)
    def transform_value(self, x: ValueType) -> ValueType:
        # sqrt(|x| + 1) - 1, without the cancellation for small x
        result: ValueType = x / ((abs(x) + 1.0) ** 0.5 + 1.0) + self.epsilon * x
        return result

    @override(ValueTransform)
    def transform_value_inv(self, x: ValueType) -> ValueType:
        # u = sqrt(|x| + 1) - 1 solves epsilon u^2 + (1 + 2 epsilon) u = |value|; in the form that cancels nothing
        linear = 1.0 + 2.0 * self.epsilon
        u = 2.0 * x / (linear + (linear**2 + 4.0 * self.epsilon * abs(x)) ** 0.5)
        result: ValueType = u * (abs(u) + 2.0)
        return result


def support_to_scalar(logits: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Return the expected value of categorical distributions over the integers of a range.

    :param logits: `[..., high - low + 1]`.
    :param support_range: The smallest and the largest integer, `(low, high)`.
    :return: `[...]`.
    :raises ValueError: There is not one logit for each value of the support.
    """
    low, high = support_range
    support = torch.arange(low, high + 1, dtype=logits.dtype, device=logits.device)
    if logits.shape[-1] != len(support):
        raise ValueError(f"A support from {low} to {high} needs {len(support)} logits, found {logits.shape[-1]}.")
    return (torch.softmax(logits, dim=-1) * support).sum(dim=-1)


def scalar_to_support(scalar: Tensor, support_range: tuple[int, int]) -> Tensor:
    """Distribute each scalar's probability over its two neighbouring integers, so that the expectation is the scalar.

    :param scalar: `[...]`; values outside the range are clipped to it.
    :param support_range: The smallest and the largest integer, `(low, high)`.
    :return: `[..., high - low + 1]`.
    """
    low, high = support_range
    position = scalar.clamp(low, high) - low
    lower = position.floor()
    upper_probability = position - lower
    lower_index = lower.long()
    upper_index = (lower_index + 1).clamp(max=high - low)  # at the upper end its probability is zero
    support = torch.zeros(*scalar.shape, high - low + 1, dtype=upper_probability.dtype, device=scalar.device)
    support.scatter_add_(-1, lower_index.unsqueeze(-1), (1.0 - upper_probability).unsqueeze(-1))
    support.scatter_add_(-1, upper_index.unsqueeze(-1), upper_probability.unsqueeze(-1))
    return support


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
