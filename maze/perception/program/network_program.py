"""Networks as programs: the operations of a forward pass, read once and run in NumPy.

A module describes its `forward` by a method `describe_forward(reader, inputs)`, which adds the operations of `forward`
to a :class:`ProgramReader`, from the places of its inputs to those of its outputs. Networks that cannot be described
(other layers, hooks, a replaced `forward`) have no program; callers use the module itself.

:mod:`~maze.perception.program.numpy_networks` runs programs, for one or for many sets of parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from maze.perception.weight_init import Tanh

Place: TypeAlias = int
"""Index of a tensor in the list of all tensors of a program."""
Places: TypeAlias = Mapping[str, Place]
Array: TypeAlias = np.ndarray[Any, Any]

ACTIVATIONS = (nn.ReLU, nn.Tanh, Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.SELU)
"""The activations that programs know."""

_COMPUTING_METHODS = ("forward", "normalized_forward", "latent")
"""If a subclass replaces one of them, an inherited description does not apply."""


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
    """Record the operations of modules; those without a description raise an error for :func:`read_program`."""

    def __init__(self) -> None:
        self.inputs: dict[str, Place] = defaultdict(self._new_place)
        """Places of the network's inputs, and of hidden states that it is given beside them; a new key gets one."""
        self.carried: dict[str, Place] = {}
        """Places of the next values of hidden states, which the program returns beside its outputs."""
        self.operations: list[Operation] = []
        self.n_places = 0

    def module(self, module: nn.Module, inputs: Places) -> Places:
        """Return the outputs of a module that describes itself, by key."""
        if not _describes_itself(type(module)):
            raise UnreadableError
        outputs: Places = module.describe_forward(self, inputs)  # type: ignore[operator]  # nn.Module hides methods
        return outputs

    def layer(self, layer: nn.Module, source: Place) -> Place:
        """Return the output of a linear layer, an activation, or several of them one after the other."""
        kind = type(layer)
        if kind is nn.Sequential:
            for child in layer.children():
                source = self.layer(child, source)
            return source
        if kind is nn.Identity:
            return source
        if isinstance(layer, nn.Linear) and kind is nn.Linear:
            return self._add(Linear(source, self._new_place(), layer))
        if kind in ACTIVATIONS and not getattr(layer, "inplace", False):
            return self._add(Activation(source, self._new_place(), layer))
        raise UnreadableError

    def flatten(self, source: Place, n_dims: int) -> Place:
        """Return the last `n_dims` dimensions joined to one; 0 adds a dimension of size one."""
        function = ArrayFunction(lambda array: array.reshape(*array.shape[: array.ndim - n_dims], -1))
        return source if n_dims == 1 else self.apply(function, source)

    def unflatten(self, source: Place, shape: Sequence[int]) -> Place:
        """Return the last dimension in another shape."""
        function = ArrayFunction(lambda array: array.reshape(*array.shape[:-1], *shape))
        return source if len(shape) == 1 else self.apply(function, source)

    def concatenate(self, sources: Sequence[Place], axis: int) -> Place:
        """Return several tensors joined along an axis, which is negative."""
        function = ArrayFunction(lambda *arrays: np.concatenate(arrays, axis=axis))
        return sources[0] if len(sources) == 1 else self.apply(function, *sources)

    def apply(self, function: Function, *sources: Place) -> Place:
        """Return the result of any other function, whose arguments are `[batch, ...]`."""
        return self._add(Apply(sources, self._new_place(), function))

    def _add(self, operation: Operation) -> Place:
        self.operations.append(operation)
        return operation.target

    def _new_place(self) -> Place:
        self.n_places += 1
        return self.n_places - 1


def read_program(network: nn.Module) -> Program | None:
    """Return the program of a network; `None` where only the module itself can compute what it does."""
    modules = ModuleWatch(network)
    if not modules.are_unchanged():
        return None
    reader = ProgramReader()
    try:
        outputs = reader.module(network, reader.inputs)
    except UnreadableError:
        return None
    outputs = {**outputs, **reader.carried}
    return Program(dict(reader.inputs), tuple(reader.operations), outputs, reader.n_places, modules)


_HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


class ModuleWatch:
    """Detect changes of a network's computation, other than of its parameters."""

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


TensorDict = dict[str, Tensor]


class TorchPopulation:
    """One network of any kind with many sets of parameters, mapped over them by `torch.func.vmap`.

    :param network: The network; it stays unchanged.
    :param stacked: Arrays `[n_rows, *shape]` for parameters, by `id`; their memory is read at every call. Other
        parameters are the network's own.
    """

    def __init__(self, network: nn.Module, stacked: Mapping[int, Array]) -> None:
        self._network = network
        # each place once, although modules and parameters may be registered under several names
        self._slots: list[tuple[dict[str, Any], str, int]] = [
            (vars(module)["_parameters"], name, id(parameter))
            for module in network.modules()
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
            if id(parameter) in stacked
        ]
        self._stacked = {key: torch.from_numpy(stacked[key]) for _, _, key in self._slots}

    def __call__(self, observation: Mapping[str, Array], rows: slice | Array) -> TensorDict:
        """Return the network's outputs `[batch, ...]`.

        :param observation: Arrays `[batch, ...]`.
        :param rows: Whose parameters are used, for the observation at the same place in the batch.
        :raises RuntimeError: An operation of the network cannot be mapped.
        """
        index = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        parameters = {key: tensor[index] for key, tensor in self._stacked.items()}
        inputs = {key: torch.as_tensor(array, dtype=torch.get_default_dtype()) for key, array in observation.items()}
        outputs: TensorDict = torch.func.vmap(self._one)(parameters, inputs)
        return outputs

    def _one(self, parameters: dict[int, Tensor], observation: TensorDict) -> TensorDict:
        replaced = [slots[name] for slots, name, _ in self._slots]
        try:
            for slots, name, key in self._slots:
                slots[name] = parameters[key]
            outputs = self._network({key: value.unsqueeze(0) for key, value in observation.items()})
        finally:
            for (slots, name, _), parameter in zip(self._slots, replaced, strict=True):
                slots[name] = parameter
        return {key: value.squeeze(0) for key, value in outputs.items()}
