"""Networks that flatten and concatenate all observations and process them with dense layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from maze.core.agent.dense_networks import DenseLayers, describe_dense_layers
from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.perception.blocks.numpy_forward import ArrayFunction, array_function
from maze.perception.weight_init import make_module_init_normc

ArrayDict = dict[str, np.ndarray]


class FlattenConcatBaseNet(nn.Module):
    """Flattens and concatenates the observations and feeds them to dense layers, each followed by ``non_lin``.

    :param obs_shapes: Shapes of the observations, without batch dimensions, in the order of concatenation.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    :raises ConfigError: There are no observations, or there is no activation.
    """

    def __init__(
        self, obs_shapes: dict[str, Sequence[int]], hidden_units: list[int], non_lin: str | type[nn.Module]
    ) -> None:
        super().__init__()
        if not obs_shapes:
            raise ConfigError(f"{type(self).__name__}: there are no observations to process (`obs_shapes` is empty).")
        activation = Factory(nn.Module).type_from_name(non_lin, config_path="non_lin")
        if activation is nn.Module:
            raise ConfigError(f"{type(self).__name__}: choose an activation for `non_lin`, e.g. torch.nn.Tanh.")
        self._obs_shapes = {key: tuple(shape) for key, shape in obs_shapes.items()}
        widths = [sum(math.prod(shape) for shape in self._obs_shapes.values()), *hidden_units]
        layers: list[nn.Module] = []
        for n_in, n_out in pairwise(widths):
            layers += [nn.Linear(n_in, n_out), activation()]
        self.hidden = nn.Sequential(*layers)
        self.n_latent = widths[-1]
        self.hidden.apply(make_module_init_normc(1.0))
        # one flat observation, the common case, goes straight into the first layer
        self._only_flat_key = next(iter(obs_shapes)) if [len(s) for s in self._obs_shapes.values()] == [1] else None

    def latent(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
        """Output of the last dense layer, ``[..., n_latent]``."""
        if self._only_flat_key is not None:
            features = x[self._only_flat_key]
            return self.hidden(features if features.is_floating_point() else features.float())  # type: ignore[no-any-return]  # nn.Module.__call__
        flat = []
        for key, shape in self._obs_shapes.items():
            tensor = x[key].float()
            flat.append(tensor.flatten(tensor.dim() - len(shape)) if shape else tensor.unsqueeze(-1))
        return self.hidden(torch.cat(flat, dim=-1))  # type: ignore[no-any-return]  # nn.Module.__call__

    def _dense_layers(self, heads: Mapping[str, nn.Module]) -> DenseLayers | None:
        layers = list(self.hidden)
        return describe_dense_layers(self._obs_shapes, layers[0::2], layers[1::2], heads)

    def _latent_program(self) -> Callable[[Mapping[str, np.ndarray]], np.ndarray] | None:
        """The latent in NumPy; ``None``: the activation has no NumPy form."""
        steps = _array_functions(self.hidden)
        if steps is None:
            return None
        keys, only_flat_key = list(self._obs_shapes), self._only_flat_key

        def latent(x: Mapping[str, np.ndarray]) -> np.ndarray:
            if only_flat_key is not None:
                array = x[only_flat_key]
            else:
                array = np.concatenate([x[key].reshape(len(x[key]), -1) for key in keys], axis=1)
            for step in steps:
                array = step(array)
            return array

        return latent


class FlattenConcatPolicyNet(FlattenConcatBaseNet):
    """Policy network with one linear output for each action head.

    :param obs_shapes: Shapes of the observations, without batch dimensions.
    :param action_logits_shapes: Shapes of the logits by action head.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        action_logits_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        non_lin: str | type[nn.Module] = nn.Module,
    ) -> None:
        super().__init__(obs_shapes, hidden_units, non_lin)
        self._head_shapes = {head: tuple(shape) for head, shape in action_logits_shapes.items()}
        self.heads = nn.ModuleList(nn.Linear(self.n_latent, math.prod(s)) for s in self._head_shapes.values())
        self.heads.apply(make_module_init_normc(0.01))  # starts close to the uniform policy
        self._only_flat_head = (
            next(iter(self._head_shapes)) if [len(s) for s in self._head_shapes.values()] == [1] else None
        )

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Logits by action head, ``[..., *logits shape]``."""
        latent = self.latent(x)
        if self._only_flat_head is not None:
            return {self._only_flat_head: self._modules["heads"][0](latent)}  # type: ignore[index]  # a ModuleList
        logits = {}
        for (head, shape), layer in zip(self._head_shapes.items(), self.heads, strict=True):
            output = layer(latent)
            logits[head] = output if len(shape) == 1 else output.unflatten(-1, shape)
        return logits

    def numpy_program(self) -> Callable[[Mapping[str, np.ndarray]], ArrayDict] | None:
        """The forward pass in NumPy, see :mod:`maze.core.agent.compiled_network`.

        It takes arrays `[batch, ...]` and returns logits `[batch, *logits_shape]` by action head.
        """
        latent_program = self._latent_program()
        heads = [
            (head, shape, _BufferedLinear(layer))
            for (head, shape), layer in zip(self._head_shapes.items(), self.heads, strict=True)
            if isinstance(layer, nn.Linear)
        ]
        if latent_program is None:
            return None

        def forward(x: Mapping[str, np.ndarray]) -> ArrayDict:
            latent = latent_program(x)
            return {
                head: layer(latent) if len(shape) == 1 else layer(latent).reshape(len(latent), *shape)
                for head, shape, layer in heads
            }

        return forward

    def dense_layers(self) -> DenseLayers | None:
        """The forward pass as a description, see :mod:`maze.core.agent.dense_networks`."""
        if any(len(shape) != 1 for shape in self._head_shapes.values()):
            return None
        return self._dense_layers(dict(zip(self._head_shapes, self.heads, strict=True)))


class FlattenConcatStateValueNet(FlattenConcatBaseNet):
    """State value network.

    :param obs_shapes: Shapes of the observations, without batch dimensions.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    """

    def __init__(
        self, obs_shapes: dict[str, Sequence[int]], hidden_units: list[int], non_lin: str | type[nn.Module]
    ) -> None:
        super().__init__(obs_shapes, hidden_units, non_lin)
        self.value_head = nn.Linear(self.n_latent, 1)
        self.value_head.apply(make_module_init_normc(1.0))

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The value of the state, ``{"value": [..., 1]}``."""
        return {"value": self.value_head(self.latent(x))}


class FlattenConcatStateActionValueNet(FlattenConcatBaseNet):
    """State-action value network, see :mod:`maze.core.agent.torch_state_action_critic`.

    :param obs_shapes: Shapes of the observations, and of the encoded actions where they are inputs.
    :param q_value_shapes: Shapes of the values by key.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation, as a class or an import path.
    """

    def __init__(
        self,
        obs_shapes: dict[str, Sequence[int]],
        q_value_shapes: dict[str, Sequence[int]],
        hidden_units: list[int],
        non_lin: str | type[nn.Module],
    ) -> None:
        super().__init__(obs_shapes, hidden_units, non_lin)
        self._q_value_keys = list(q_value_shapes)
        self.heads = nn.ModuleList(nn.Linear(self.n_latent, math.prod(shape)) for shape in q_value_shapes.values())
        self.heads.apply(make_module_init_normc(0.1))

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values by key, ``[..., n]``."""
        latent = self.latent(x)
        return {key: head(latent) for key, head in zip(self._q_value_keys, self.heads, strict=True)}

    def dense_layers(self) -> DenseLayers | None:
        """The forward pass as a description, see :mod:`maze.core.agent.dense_networks`."""
        return self._dense_layers(dict(zip(self._q_value_keys, self.heads, strict=True)))


class _BufferedLinear:
    """A linear layer on the memory of its parameters that writes into one buffer for each batch size."""

    def __init__(self, layer: nn.Linear) -> None:
        self._weight = layer.weight.detach().numpy().T
        self._bias: Any = layer.bias.detach().numpy()
        self._buffers: dict[int, np.ndarray] = {}

    def __call__(self, x: np.ndarray) -> np.ndarray:
        buffer = self._buffers.get(len(x))
        if buffer is None:
            buffer = self._buffers[len(x)] = np.empty((len(x), self._weight.shape[1]), np.float32)
        np.dot(x, self._weight, buffer)
        np.add(buffer, self._bias, buffer)
        return buffer


def _array_functions(layers: nn.Sequential) -> list[ArrayFunction] | None:
    functions: list[ArrayFunction] = []
    for layer in layers:
        function = _BufferedLinear(layer) if type(layer) is nn.Linear else array_function(layer)
        if function is None:
            return None
        functions.append(function)
    return functions
