"""Forward passes of simple layers in NumPy.

For one or a few small observations most of a network's forward pass is overhead of tensors and modules. A program
built here calls NumPy directly, on the memory of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from maze.perception.blocks.base import Array, NumpyProgram, PerceptionBlock

ArrayFunction: TypeAlias = Callable[[Array], Array]


def sequential_program(in_key: str, out_key: str, layers: Sequence[nn.Module]) -> NumpyProgram | None:
    """The program of layers applied one after the other; ``None`` where one of them has no NumPy form."""
    functions = [array_function(layer) for layer in layers]
    if any(function is None for function in functions):
        return None
    steps = [function for function in functions if function is not None]

    def program(inputs: Mapping[str, Array]) -> dict[str, Array]:
        array = inputs[in_key]
        for step in steps:
            array = step(array)
        return {out_key: array}

    return program


def chained_program(blocks: Sequence[PerceptionBlock]) -> NumpyProgram | None:
    """The program of blocks that each process the output of the one before; ``None`` where one has none."""
    programs = [block.numpy_program() for block in blocks]
    if any(program is None for program in programs):
        return None
    steps = [program for program in programs if program is not None]

    def run(inputs: Mapping[str, Array]) -> dict[str, Array]:
        arrays = dict(inputs)
        for step in steps:
            arrays = step(arrays)
        return arrays

    return run


def array_function(layer: nn.Module) -> ArrayFunction | None:
    """The layer as a function of arrays that returns a fresh array; ``None``: it has no NumPy form.

    The functions of activations may overwrite their argument, which is the fresh result of the layer before.
    """
    if layer._forward_hooks or layer._forward_pre_hooks:
        return None
    if type(layer) is nn.Linear:
        return _linear(layer)
    activation = _ACTIVATIONS.get(type(layer))
    return activation(layer) if activation is not None else None


def is_shareable(tensor: torch.Tensor) -> bool:
    """Whether NumPy can read the tensor's memory without losing precision or the connection."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.float64)


def _linear(layer: nn.Linear) -> ArrayFunction | None:
    if not is_shareable(layer.weight):
        return None
    weight = layer.weight.detach().numpy().T
    parameter = layer._parameters["bias"]
    if parameter is None:
        return lambda array: np.matmul(array, weight)
    bias = parameter.detach().numpy()

    def apply(array: Array) -> Array:
        result: Array = np.matmul(array, weight)
        result += bias
        return result

    return apply


def _relu(_: nn.Module) -> ArrayFunction:
    return lambda array: np.maximum(array, 0.0, out=array)


def _tanh(_: nn.Module) -> ArrayFunction:
    return lambda array: np.tanh(array, out=array)


def _sigmoid(_: nn.Module) -> ArrayFunction:
    # By tanh, because exp overflows for large arguments.
    return lambda array: 0.5 * np.tanh(0.5 * array) + 0.5


def _leaky_relu(layer: nn.Module) -> ArrayFunction:
    assert isinstance(layer, nn.LeakyReLU)
    slope = layer.negative_slope
    return lambda array: np.where(array >= 0.0, array, array * slope)


def _elu(layer: nn.Module) -> ArrayFunction:
    assert isinstance(layer, nn.ELU)
    alpha = layer.alpha
    return lambda array: np.where(array > 0.0, array, alpha * np.expm1(np.minimum(array, 0.0)))


def _selu(_: nn.Module) -> ArrayFunction:
    alpha, scale = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017, eq. 14
    return lambda array: scale * np.where(array > 0.0, array, alpha * np.expm1(np.minimum(array, 0.0)))


def _identity(_: nn.Module) -> ArrayFunction:
    return lambda array: array


_ACTIVATIONS: dict[type[nn.Module], Callable[[nn.Module], ArrayFunction]] = {
    nn.ReLU: _relu,
    nn.Tanh: _tanh,
    nn.Sigmoid: _sigmoid,
    nn.LeakyReLU: _leaky_relu,
    nn.ELU: _elu,
    nn.SELU: _selu,
    nn.Identity: _identity,
}
