"""Programs in NumPy: for acting, and for populations of parameters.

Between two environment steps a network sees a few small observations, for which torch spends most of its time on
dispatching. Here a program becomes a list of NumPy calls on the memory of the torch parameters. Inputs and outputs are
arrays `[batch, ...]`; the outputs may be overwritten by the next call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from maze.perception.program.network_program import (
    Activation,
    Apply,
    Array,
    Linear,
    Operation,
    Place,
    Program,
    read_program,
)

Arrays: TypeAlias = dict[str, Array]
Rows: TypeAlias = slice | Array
ArrayFunction: TypeAlias = Callable[[Array], Array]
_ALL = slice(None)
_Step: TypeAlias = Callable[[list[Array], Rows], None]
"""Fill a place, with the parameters in some rows."""


class NumpyNetwork:
    """A network on the memory of its parameters; optimiser steps and loaded states take effect. See :func:`in_numpy`.

    :param program: A program whose parameters are float32 on the CPU.
    """

    def __init__(self, program: Program) -> None:
        self._modules = program.modules
        self._parameters = [vars(layer)["_parameters"].values() for layer in program.linear_layers]
        self._addresses = self._addresses_now()
        self._run = _compiled(program, _own_linear)

    def __call__(self, observation: Mapping[str, Array]) -> Arrays:
        """Return the network's outputs for a batch of observations of any type."""
        return self._run(observation, _ALL)

    def is_current(self) -> bool:
        """Return whether the network still is what it was, with its parameters in the memory that is read here."""
        return self._addresses_now() == self._addresses and self._modules.are_unchanged()

    def _addresses_now(self) -> list[int]:
        """Return the addresses of the parameters (0: none), and keep their memory, so that it is not reused."""
        parameters: Iterator[Any] = chain.from_iterable(self._parameters)
        try:
            return list(map(torch.Tensor.data_ptr, parameters))  # called for every batch
        except TypeError:  # a layer without a bias
            return [0 if one is None else one.data_ptr() for one in chain.from_iterable(self._parameters)]


def in_numpy(network: nn.Module) -> NumpyNetwork | None:
    """Return the network in NumPy; `None` where only torch can compute it faithfully."""
    program = read_program(network)
    return None if program is None or not _is_shareable(program) else NumpyNetwork(program)


def population_in_numpy(
    network: nn.Module, stacked: Mapping[int, Array]
) -> Callable[[Mapping[str, Array], Rows], Arrays] | None:
    """Return the network with many sets of parameters in NumPy, of which each computes the same in any company.

    :param stacked: Arrays `[n_rows, *shape]` for parameters, by `id`; their memory is read at every call. Other
        parameters are the network's own.
    :return: A function of observations `[batch, ...]` and of the rows whose parameters are used for them; `None` where
        only torch can compute it faithfully.
    """
    program = read_program(network)
    if program is None or not _is_shareable(program):
        return None
    return _compiled(program, lambda operation: _stacked_linear(operation, stacked))


def _is_shareable(program: Program) -> bool:
    """Return whether NumPy can read the memory of all parameters."""
    parameters = [parameter for layer in program.linear_layers for parameter in layer.parameters()]
    return all(parameter.device.type == "cpu" and parameter.dtype is torch.float32 for parameter in parameters)


# -- from operations to calls -----------------------------------------------------------------------------------------


def _compiled(program: Program, linear: Callable[[Linear], _Step]) -> Callable[[Mapping[str, Array], Rows], Arrays]:
    """Return the program as a function of observations and rows of parameters.

    :param linear: Makes the step of a linear layer, whose result is in memory of its own.
    """
    # activations overwrite their argument where no other operation reads it
    n_readers = Counter(program.outputs.values())
    for operation in program.operations:
        n_readers.update(operation.sources if isinstance(operation, Apply) else [operation.source])
    fresh = {operation.target for operation in program.operations if isinstance(operation, Linear | Activation)}
    activations = [operation for operation in program.operations if isinstance(operation, Activation)]
    in_place = {one.target for one in activations if one.source in fresh and n_readers[one.source] == 1}
    steps = [_step(operation, linear, operation.target in in_place) for operation in program.operations]
    inputs, outputs, n_places = list(program.inputs.items()), list(program.outputs.items()), program.n_places

    def run(observation: Mapping[str, Array], rows: Rows) -> Arrays:
        at: list[Any] = [None] * n_places
        for key, place in inputs:
            array = observation[key]
            at[place] = array if array.dtype == np.float32 else array.astype(np.float32)
        for step in steps:
            step(at, rows)
        return {key: at[place] for key, place in outputs}

    return run


def _step(operation: Operation, linear: Callable[[Linear], _Step], in_place: bool) -> _Step:
    match operation:
        case Linear():
            return linear(operation)
        case Activation(source, target, layer):
            return _in_place(layer, source, target) if in_place else _applied(_activation(layer), source, target)
        case Apply((source,), target, function):
            return _applied(function.in_numpy, source, target)
        case Apply(sources, target, function):
            return lambda at, _: at.__setitem__(target, function.in_numpy(*[at[source] for source in sources]))


def _applied(function: ArrayFunction, source: Place, target: Place) -> _Step:
    def step(at: list[Array], _: Rows) -> None:
        at[target] = function(at[source])

    return step


def _own_linear(operation: Linear) -> _Step:
    """Return a linear layer on the memory of its parameters that writes into one buffer for each shape of its input."""
    source, target, layer = operation.source, operation.target, operation.layer
    weight: Array = layer.weight.detach().numpy().T
    bias: Array | None = layer.bias.detach().numpy() if "bias" in dict(layer.named_parameters()) else None
    buffers: dict[tuple[int, ...], Array] = {}
    dot, matmul, add = np.dot, np.matmul, np.add

    def step(at: list[Array], _: Rows) -> None:
        array = at[source]
        shape = array.shape
        buffer = buffers.get(shape)
        if buffer is None:
            buffer = buffers[shape] = np.empty((*shape[:-1], weight.shape[1]), np.float32)
        if len(shape) == 2:
            dot(array, weight, buffer)  # the same product with less overhead
        else:
            matmul(array, weight, buffer)
        if bias is not None:
            add(buffer, bias, buffer)
        at[target] = buffer

    return step


def _stacked_linear(operation: Linear, stacked: Mapping[int, Array]) -> _Step:
    """Return a linear layer with a set of parameters for each row; those that are not stacked are the same for all."""
    source, target, layer = operation.source, operation.target, operation.layer

    def of_rows(name: str) -> Callable[[Rows], Array] | None:
        parameter = getattr(layer, name)
        if parameter is None:
            return None
        rows_of = stacked.get(id(parameter))
        if rows_of is not None:
            return lambda rows: rows_of[rows]
        only = parameter.detach().numpy()[np.newaxis]
        return lambda _: only

    weight_of, bias_of = of_rows("weight"), of_rows("bias")
    assert weight_of is not None, "a linear layer has weights"

    def step(at: list[Array], rows: Rows) -> None:
        # one column for each row of parameters: its product does not depend on the other rows
        array = at[source]
        are_vectors = array.ndim == 2
        columns = array[:, :, np.newaxis] if are_vectors else array.swapaxes(-1, -2)
        weight = weight_of(rows)
        middle = (1,) * (columns.ndim - 3)
        result: Array = np.matmul(weight.reshape(len(weight), *middle, *weight.shape[1:]), columns)
        if bias_of is not None:
            bias = bias_of(rows)
            result += bias.reshape(len(bias), *middle, -1, 1)
        at[target] = result[:, :, 0] if are_vectors else result.swapaxes(-1, -2)

    return step


# -- activations ------------------------------------------------------------------------------------------------------

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017, eq. 14


def _in_place(layer: nn.Module, source: Place, target: Place) -> _Step:
    """Return an activation that overwrites its argument, where it can."""
    if not isinstance(layer, nn.ReLU | nn.Tanh):
        return _applied(_activation(layer), source, target)
    is_tanh = isinstance(layer, nn.Tanh)
    tanh, maximum = np.tanh, np.maximum

    def step(at: list[Array], _: Rows) -> None:
        array = at[target] = at[source]
        if is_tanh:
            tanh(array, array)
        else:
            maximum(array, 0.0, out=array)

    return step


def _activation(layer: nn.Module) -> ArrayFunction:
    match layer:
        case nn.ReLU():
            return lambda x: np.maximum(x, 0.0)
        case nn.Tanh():
            return np.tanh
        case nn.Sigmoid():
            return lambda x: 0.5 * np.tanh(0.5 * x) + 0.5  # exp overflows for large arguments
        case nn.LeakyReLU(negative_slope=slope):
            return lambda x: np.where(x >= 0.0, x, x * slope)
        case nn.ELU(alpha=alpha):
            return lambda x: np.where(x > 0.0, x, alpha * np.expm1(np.minimum(x, 0.0)))
        case nn.SELU():
            return lambda x: _SELU_SCALE * np.where(x > 0.0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0.0)))
    raise NotImplementedError(f"{type(layer).__name__} is not an activation of programs.")
