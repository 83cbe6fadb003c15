"""Initial weights of networks, and activations by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.perception.fast_layers import Tanh, mkl_is_slow


def activation_type(non_lin: str | type[nn.Module], config_path: str) -> type[nn.Module]:
    """Return the class of an activation; for `torch.nn.Tanh`, where torch is slow, a faster equivalent.

    :param non_lin: The class, or its name.
    :param config_path: Key of the configuration, for messages.
    :raises ConfigError: There is no such module.
    """
    found = Factory(nn.Module).type_from_name(non_lin, config_path=config_path)
    return Tanh if found is nn.Tanh and mkl_is_slow() else found


_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def make_module_init_normc(std: float = 1.0) -> Callable[[nn.Module], None]:
    """Initialise linear and convolution layers with weight vectors of length `std` and biases of zero.

    The weights into each unit are a random direction scaled to Euclidean length `std`, whatever their number. Other
    modules are left as they are, so that the result fits `net.apply`:

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> _ = net.apply(make_module_init_normc(0.5))
    >>> bool(torch.allclose(net[0].weight.norm(dim=1), torch.tensor(0.5)))
    True

    :param std: Length of the weight vector of each unit; small for action heads (0.01), so that a policy starts close
        to uniform.
    """

    def initialise(module: nn.Module) -> None:
        if not isinstance(module, _LAYERS):
            return
        with torch.no_grad():
            weight = torch.randn_like(module.weight)
            # The columns of the matrix that maps inputs to units: one vector of all incoming weights per unit.
            norm = weight.flatten(start_dim=1).norm(dim=1)
            weight *= (std / norm).reshape(-1, *[1] * (weight.dim() - 1))
            module.weight.copy_(weight)
            if module.bias is not None:
                module.bias.zero_()

    return initialise


def make_module_init_orthogonal(gain: float = 1.0) -> Callable[[nn.Module], None]:
    """Initialise linear and convolution layers with orthogonal weight matrices and biases of zero (Saxe et al. 2014).

    The weight vectors of different units are perpendicular as long as there are not more units than inputs, and have
    length `gain`. Other modules are left as they are, so that the result fits `net.apply`:

    >>> net = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    >>> _ = net.apply(make_module_init_orthogonal(2.0))
    >>> bool(torch.allclose(net[0].weight @ net[0].weight.T, 4.0 * torch.eye(4), atol=1e-5))
    True

    :param gain: Factor of the orthogonal matrix.
    """

    def initialise(module: nn.Module) -> None:
        if isinstance(module, _LAYERS):
            nn.init.orthogonal_(module.weight, gain)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    return initialise


def spread_zero_biases(module: nn.Module) -> None:
    """Draw the biases of a linear or convolution layer uniformly within `1 / sqrt(n_inputs)` if all of them are zero.

    With biases of zero, all hidden units change their slope at the origin, and a network with ReLU is linear along each
    ray from it. Values that are fitted to logged decisions then extrapolate badly to other actions.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).apply(make_module_init_normc())
    >>> bool(net.apply(spread_zero_biases)[0].bias.abs().max() <= 0.5)
    True
    """
    if isinstance(module, _LAYERS) and module.bias is not None and not bool(module.bias.any()):
        bound = module.weight[0].numel() ** -0.5
        nn.init.uniform_(module.bias, -bound, bound)


@dataclass(frozen=True)
class Initialization:
    """Initial weights of the layers of a template's networks.

    :param layers: Initialises the layers of a module whose units get weight vectors of a length.
    :param hidden_length: That length for all layers but outputs.
    """

    layers: Callable[[float], Callable[[nn.Module], None]]
    hidden_length: float

    def hidden(self) -> Callable[[nn.Module], None]:
        """Initialise all layers but outputs."""
        return self.layers(self.hidden_length)


INITIALIZATIONS: Mapping[str, Initialization] = {
    "normc": Initialization(make_module_init_normc, 1.0),
    # as the literature on PPO has it (Engstrom et al. 2020; Andrychowicz et al. 2021)
    "orthogonal": Initialization(make_module_init_orthogonal, math.sqrt(2.0)),
}
"""Initializations by the names that configurations may use."""


def compute_sigmoid_bias(probability: float) -> float:
    """Return the bias (logit) at which a sigmoid returns `probability`, such as for multi-binary actions.

    >>> compute_sigmoid_bias(0.5)
    0.0

    :param probability: In (0, 1).
    :raises ConfigError: It is not a probability, or 0 or 1.
    """
    if not 0.0 < probability < 1.0:
        raise ConfigError(f"compute_sigmoid_bias: `probability` must lie in (0, 1), found {probability}.")
    return math.log(probability / (1.0 - probability))
