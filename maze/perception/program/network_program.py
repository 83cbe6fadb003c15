"""Networks as programs: the operations of a forward pass, read once and run in NumPy.

A module describes its `forward` by a method `describe_forward(reader, inputs)`, which adds the operations of `forward`
to a :class:`ProgramReader`, from the places of its inputs to those of its outputs. Networks that cannot be described
(other layers, hooks, a replaced `forward`) have no program; callers use the module itself.

Programs are for acting, and for populations of parameters: between two environment steps a network sees a few small
observations, for which torch spends most of its time on dispatching. In NumPy a program becomes a list of calls on the
memory of the torch parameters. Inputs and outputs are arrays `[batch, ...]`; the outputs may be overwritten by the next
call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as _module

from maze.perception import fast_layers

Place: TypeAlias = int
"""Index of a tensor in the list of all tensors of a program."""
Places: TypeAlias = Mapping[str, Place]
Array: TypeAlias = np.ndarray[Any, Any]

ACTIVATIONS = (nn.ReLU, nn.Tanh, fast_layers.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU)
"""The activations of programs."""

# If a subclass replaces one of them, an inherited description does not apply.
_COMPUTING_METHODS = ("forward", "normalized_forward", "latent")


@dataclass(frozen=True)
class Linear:
    """`source @ weight.T + bias`, with the parameters that the layer has at the time."""

    source: Place
    target: Place
    layer: nn.Linear


@dataclass(frozen=True)
class Activation:
    """An activation of the layer's type and settings."""

    source: Place
    target: Place
    layer: nn.Module


class Function(Protocol):
    """A function without parameters, which does not change its arguments."""

    def in_numpy(self, *arrays: Array) -> Array:
        """Return the result `[..., *shape]`, for any leading batch dimensions."""


@dataclass(frozen=True)
class ArrayFunction:
    """A function of arrays, see :class:`Function`."""

    in_numpy: Callable[..., Array]


@dataclass(frozen=True)
class FunctionPair(ArrayFunction):
    """The same function for tensors."""

    in_torch: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Apply:
    """Anything without parameters."""

    sources: tuple[Place, ...]
    target: Place
    function: Function


Operation: TypeAlias = Linear | Activation | Apply


@dataclass(frozen=True)
class Program:
    """The forward pass of a network.

    Parameters are those of the network's own layers: optimiser steps, loaded states and replaced parameters count.

    :param inputs: Places of the inputs, and of hidden states, by key.
    :param operations: The operations in the order of their evaluation.
    :param outputs: Places of the outputs, and of the next hidden states, by key.
    :param n_places: Number of tensors: inputs and results of operations.
    :param modules: Tells whether the program still describes the network.
    """

    inputs: Places
    operations: tuple[Operation, ...]
    outputs: Places
    n_places: int
    modules: ModuleWatch

    @property
    def linear_layers(self) -> list[nn.Linear]:
        """All linear layers, each one once."""
        layers = [operation.layer for operation in self.operations if isinstance(operation, Linear)]
        return list(dict.fromkeys(layers))


class ProgramReader:
    """Record the operations of modules; those without a description raise an error for :func:`read_program`.

    :param is_for_population: Whether rows have parameters of their own, so that what is computed for one must not
        depend on the others, not even in the number of rows.
    """

    def __init__(self, is_for_population: bool = False) -> None:
        self.is_for_population = is_for_population
        self.inputs: dict[str, Place] = defaultdict(self._new_place)
        """Places of the network's inputs, and of hidden states that it is given beside them; a new key gets one."""
        self.carried: dict[str, Place] = {}
        """Places of the next values of hidden states, which the program returns beside its outputs."""
        self.operations: list[Operation] = []
        self.n_places = 0

    def module(self, module: nn.Module, inputs: Places) -> Places:
        """Return the outputs of a module that describes itself, by key.

        :param module: The module, with a method `describe_forward`.
        :param inputs: Places of its inputs by key.
        :raises UnreadableError: The module has no description, or a subclass replaced what is described.
        """
        if not _describes_itself(type(module)):
            raise UnreadableError
        outputs: Places = module.describe_forward(self, inputs)  # type: ignore[operator]  # nn.Module hides methods
        return outputs

    def layer(self, layer: nn.Module, source: Place) -> Place:
        """Return the output of a linear layer, an activation, or several of them one after the other.

        :param layer: `nn.Linear`, :class:`maze.perception.fast_layers.Linear`, `nn.Identity`, one of
            :data:`ACTIVATIONS`, or a `nn.Sequential` of these.
        :param source: Place of the input, `[..., n_features]` of a linear layer.
        :raises UnreadableError: It is a layer of any other class, or an activation with `inplace=True`.
        """
        kind = type(layer)
        if kind is nn.Sequential:
            for child in layer.children():
                source = self.layer(child, source)
            return source
        if kind is nn.Identity:
            return source
        if isinstance(layer, nn.Linear) and kind in (nn.Linear, fast_layers.Linear):
            return self._add(Linear(source, self._new_place(), layer))
        if kind in ACTIVATIONS and not getattr(layer, "inplace", False):
            return self._add(Activation(source, self._new_place(), layer))
        raise UnreadableError

    def flatten(self, source: Place, n_dims: int) -> Place:
        """Return a tensor with its last dimensions joined to one.

        :param source: Place of the tensor.
        :param n_dims: Number of dimensions to join; 0 adds a dimension of size one.
        """
        return source if n_dims == 1 else self._reshaped(source, lambda shape: (*shape[: len(shape) - n_dims], -1))

    def unflatten(self, source: Place, shape: Sequence[int]) -> Place:
        """Return a tensor with its last dimension in another shape.

        :param source: Place of the tensor, `[..., n]`.
        :param shape: The shape, with `n` elements. If it has one dimension, `source` is returned.
        """
        return source if len(shape) == 1 else self._reshaped(source, lambda before: (*before[:-1], *shape))

    def concatenate(self, sources: Sequence[Place], axis: int) -> Place:
        """Return several tensors joined along an axis.

        :param sources: Places of the tensors, at least one.
        :param axis: A negative number, since there may be several batch dimensions.
        """
        function = FunctionPair(
            lambda *arrays: np.concatenate(arrays, axis=axis), lambda *tensors: torch.cat(tensors, dim=axis)
        )
        return sources[0] if len(sources) == 1 else self.apply(function, *sources)

    def apply(self, function: Function, *sources: Place) -> Place:
        """Return the result of any other function.

        :param function: The function, which must not modify its arguments.
        :param sources: Places of its arguments, `[batch, ...]`, in their order.
        """
        return self._add(Apply(sources, self._new_place(), function))

    def _reshaped(self, source: Place, shape: Callable[[Sequence[int]], Sequence[int]]) -> Place:
        def reshaped(values: Any) -> Any:
            return values.reshape(*shape(values.shape))

        return self.apply(FunctionPair(reshaped, reshaped), source)

    def _add(self, operation: Operation) -> Place:
        self.operations.append(operation)
        return operation.target

    def _new_place(self) -> Place:
        self.n_places += 1
        return self.n_places - 1


def read_program(network: nn.Module, is_for_population: bool = False) -> Program | None:
    """Return the program of a network; `None` where only the module itself can compute its outputs.

    :param network: The network, which describes itself.
    :param is_for_population: See :class:`ProgramReader`.
    """
    modules = ModuleWatch(network)
    if not modules.are_unchanged():
        return None
    reader = ProgramReader(is_for_population)
    try:
        outputs = reader.module(network, reader.inputs)
    except UnreadableError:
        return None
    outputs = {**outputs, **reader.carried}
    return Program(dict(reader.inputs), tuple(reader.operations), outputs, reader.n_places, modules)


_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


class ModuleWatch:
    """Detect changes of a network's computation, other than of its parameters.

    :param network: The network, whose modules are compared with those that it has now.
    """

    def __init__(self, network: nn.Module) -> None:
        self._attributes = [vars(module) for module in network.modules()]
        # torch lists hooks and children in attributes only
        self._hooks: list[Mapping[Any, Any]] = [vars(_module)[f"_global_{name}"] for name in _HOOKS]
        self._hooks += [attributes[f"_{name}"] for attributes in self._attributes for name in _HOOKS]
        self._children_now = [each["_modules"] for each in self._attributes if each["_modules"]]
        self._children = [dict(children) for children in self._children_now]

    def are_unchanged(self) -> bool:
        """Return whether the modules are the same, without hooks and without a `forward` of their own."""
        if any(self._hooks):
            return False
        for attributes in self._attributes:
            if "forward" in attributes:
                return False
        return self._children_now == self._children  # the same modules are equal


class UnreadableError(Exception):
    """A module cannot be described with its settings."""


def _describes_itself(module_type: type[Any]) -> bool:
    """Return whether the description belongs to the computation in use, not to one that a subclass replaced."""
    for base in module_type.__mro__:
        if "describe_forward" in vars(base):
            return True
        if any(name in vars(base) for name in _COMPUTING_METHODS):
            return False
    return False


Arrays: TypeAlias = dict[str, Array]
Rows: TypeAlias = slice | Array
_ALL = slice(None)
# Returns the result of an operation from the arrays at all places, with the parameters in some rows.
_Step: TypeAlias = Callable[[list[Array], Rows], Array]


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
        """Return the network's outputs for a batch of observations.

        :param observation: Arrays `[batch, ...]` by key, of any type of numbers; they are converted to float32.
        :return: Arrays `[batch, ...]` by key, which the next call may overwrite.
        """
        return self._run(observation, _ALL)

    def is_current(self) -> bool:
        """Return whether the network is unchanged and its parameters are still in the memory that is read here."""
        return self._addresses_now() == self._addresses and self._modules.are_unchanged()

    def _addresses_now(self) -> list[int]:
        """Return the addresses of the parameters (0: none), and keep their memory, so that it is not reused."""
        parameters: Iterator[Any] = chain.from_iterable(self._parameters)
        try:
            return list(map(torch.Tensor.data_ptr, parameters))  # called for every batch
        except TypeError:  # a layer without a bias
            return [0 if one is None else one.data_ptr() for one in chain.from_iterable(self._parameters)]


def in_numpy(network: nn.Module) -> NumpyNetwork | None:
    """Return the network in NumPy; `None` where only torch can compute it faithfully.

    :param network: The network, with parameters of float32 on the CPU. If :meth:`NumpyNetwork.is_current` is false
        later, this function has to be called again.
    """
    program = read_program(network)
    return None if program is None or not _is_shareable(program) else NumpyNetwork(program)


def population_in_numpy(
    network: nn.Module, stacked: Mapping[int, Array]
) -> Callable[[Mapping[str, Array], Rows], Arrays] | None:
    """Return the network with many sets of parameters in NumPy; the results of a set do not depend on the others.

    :param network: The network, with parameters of float32 on the CPU.
    :param stacked: Arrays `[n_rows, *shape]` for parameters, by `id`; their memory is read at every call. Other
        parameters are the network's own.
    :return: A function of observations `[batch, ...]` and of the rows whose parameters are used for them; `None` where
        only torch can compute it faithfully.
    """
    program = read_program(network, is_for_population=True)
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
    steps = [(one.target, _step(one, linear, one.target in in_place)) for one in program.operations]
    inputs, outputs, n_places = list(program.inputs.items()), list(program.outputs.items()), program.n_places

    def run(observation: Mapping[str, Array], rows: Rows) -> Arrays:
        at: list[Any] = [None] * n_places
        for key, place in inputs:
            array = observation[key]
            at[place] = array if array.dtype == np.float32 else array.astype(np.float32)
        for target, step in steps:
            at[target] = step(at, rows)
        return {key: at[place] for key, place in outputs}

    return run


def _step(operation: Operation, linear: Callable[[Linear], _Step], in_place: bool) -> _Step:
    match operation:
        case Linear():
            return linear(operation)
        case Activation(source, _, layer):
            activation = _activation(layer)
            if in_place:
                return lambda at, _: activation(at[source], at[source])
            return lambda at, _: activation(at[source], None)
        case Apply(sources, _, function):
            return lambda at, _: function.in_numpy(*[at[source] for source in sources])


def _own_linear(operation: Linear) -> _Step:
    """Return a linear layer on the memory of its parameters that writes into a buffer."""
    source, layer = operation.source, operation.layer
    weight: Array = layer.weight.detach().numpy().T
    bias: Array | None = layer.bias.detach().numpy() if "bias" in dict(layer.named_parameters()) else None
    memory = buffer = np.empty((0, weight.shape[1]), np.float32)
    dot = np.dot

    def step(at: list[Array], _: Rows) -> Array:
        nonlocal memory, buffer
        array = at[source]
        shape = array.shape
        rows = array if len(shape) == 2 else array.reshape(-1, shape[-1])  # one product for all leading dimensions
        if len(rows) != len(buffer):
            if len(rows) > len(memory):
                memory = np.empty((len(rows), weight.shape[1]), np.float32)
            buffer = memory[: len(rows)]
        result: Array = dot(rows, weight, buffer)
        if bias is not None:
            result += bias
        return result if len(shape) == 2 else result.reshape(*shape[:-1], weight.shape[1])

    return step


def _stacked_linear(operation: Linear, stacked: Mapping[int, Array]) -> _Step:
    """Return a linear layer with a set of parameters for each row; those that are not stacked are the same for all."""
    source, layer = operation.source, operation.layer

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

    def step(at: list[Array], rows: Rows) -> Array:
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
        return result[:, :, 0] if are_vectors else result.swapaxes(-1, -2)

    return step


# -- activations ------------------------------------------------------------------------------------------------------

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # Klambauer et al. 2017, eq. 14


def _activation(layer: nn.Module) -> Callable[[Array, Array | None], Array]:
    """Return a function of an array and of memory that it may use for the result, which can be that of the array."""
    match layer:
        case nn.ReLU():
            return lambda x, out: np.maximum(x, 0.0, out=out)
        case nn.Tanh():
            return np.tanh
        case nn.Sigmoid():
            return lambda x, _: 0.5 * np.tanh(0.5 * x) + 0.5  # exp overflows for large arguments
        case nn.LeakyReLU(negative_slope=slope):
            return lambda x, _: np.where(x >= 0.0, x, x * slope)
        case nn.ELU(alpha=alpha):
            return lambda x, _: np.where(x > 0.0, x, alpha * np.expm1(np.minimum(x, 0.0)))
        case nn.SELU():
            return lambda x, _: _SELU_SCALE * np.where(x > 0.0, x, _SELU_ALPHA * np.expm1(np.minimum(x, 0.0)))
    raise NotImplementedError(f"{type(layer).__name__} is not an activation of programs.")
