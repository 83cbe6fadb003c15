"""Networks in torch that compute chains of linear layers and activations, and their gradients, in one function.

Small networks spend a third of an update on calls from module to module and on the nodes that autograd adds for each
layer, transposition and activation. The program of a network lists its layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from maze.perception.fast_layers import ACTIVATIONS, NO_ACTIVATION, chain_of_layers, is_plain
from maze.perception.program.network_program import Apply, Linear, Place, Program, read_program

_Network = TypeVar("_Network", bound=nn.Module)
_Tensors = dict[str, Tensor]
_Step = Callable[[list[Tensor]], None]


def evaluated_by_program(
    forward: Callable[[_Network, _Tensors], _Tensors],
) -> Callable[[_Network, _Tensors], _Tensors]:
    """Decorate the `forward` of networks that describe themselves: it is replaced by their program where possible.

    It is not where an operation has no form in torch, where modules have been changed or have hooks, and for inputs
    that are not float32 on the CPU, or are traced. Results are equal up to rounding; they have no second derivative.
    """

    @wraps(forward)
    def evaluated(network: _Network, x: _Tensors) -> _Tensors:
        if type(network).forward is not evaluated:  # called by the `forward` of a subclass
            return forward(network, x)
        program = vars(network).get("_in_torch")
        if program is None:
            program = vars(network)["_in_torch"] = _ProgramInTorch(network)
        outputs: _Tensors | None = program.outputs(x)
        return forward(network, x) if outputs is None else outputs

    return evaluated


class _ProgramInTorch:
    """The program of a network.

    :param network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._program = read_program(network)
        self._steps = None if self._program is None else _steps_of(self._program)
        layers = () if self._program is None else self._program.linear_layers
        self._parameters = [_parameters_of(layer) for layer in layers]

    def __reduce__(self) -> Any:
        return type(None), ()  # copies of the network have other modules, so their program is read again

    def outputs(self, tensors: _Tensors) -> _Tensors | None:
        """Return the outputs by key; `None`: the network itself has to compute them.

        :param tensors: The network's inputs `[..., *shape]` by key.
        """
        if self._program is None or self._steps is None:
            return None
        at: list[Any] = [None] * self._program.n_places
        for key, place in self._program.inputs.items():
            tensor = at[place] = tensors.get(key)
            if tensor is None or tensor.dtype is not torch.float32 or not is_plain(tensor):
                return None
        if not self._program.modules.are_unchanged():
            return None
        try:
            for of_layer in self._parameters:
                of_layer["weight"].data_ptr()
        except RuntimeError:  # parameters of a transformation such as `vmap`
            return None
        for step in self._steps:
            step(at)
        return {key: at[place] for key, place in self._program.outputs.items()}


# -- from operations to steps -----------------------------------------------------------------------------------------


def _steps_of(program: Program) -> list[_Step] | None:
    """Return functions that fill the places of a program; `None`: an operation has no form in torch."""
    n_readers = Counter(program.outputs.values())
    for operation in program.operations:
        n_readers.update(operation.sources if isinstance(operation, Apply) else [operation.source])
    found: list[_Chain | _Step] = []
    for operation in program.operations:
        if isinstance(operation, Apply):
            function = getattr(operation.function, "in_torch", None)
            if function is None:
                return None
            found.append(_applied(function, operation.sources, operation.target))
            continue
        last = found[-1] if found else None
        follows = isinstance(last, _Chain) and last.target == operation.source and n_readers[last.target] == 1
        before = found.pop() if follows else _Chain(operation.source, operation.source, [], [])
        assert isinstance(before, _Chain)
        if isinstance(operation, Linear):
            layers, names = [*before.layers, operation.layer], [*before.activations, NO_ACTIVATION]
        else:
            name = ACTIVATIONS.get(type(operation.layer))
            if name is None or before.activations[-1:] != [NO_ACTIVATION]:
                return None
            layers, names = before.layers, [*before.activations[:-1], name]
        found.append(_Chain(before.source, operation.target, layers, names))
    return [each.step() if isinstance(each, _Chain) else each for each in found]


def _applied(function: Callable[..., Tensor], sources: Sequence[Place], target: Place) -> _Step:
    def step(at: list[Tensor]) -> None:
        at[target] = function(*[at[source] for source in sources])

    return step


def _parameters_of(layer: nn.Linear) -> Mapping[str, Tensor]:
    """Return the dictionary that holds the parameters by name, also when they are replaced."""
    return vars(layer)["_parameters"]  # type: ignore[no-any-return]  # torch's attributes


class _Chain(NamedTuple):
    """Linear layers, each with the name of the activation that follows it."""

    source: Place
    target: Place
    layers: list[nn.Linear]
    activations: list[str]

    def step(self) -> _Step:
        source, target, names = self.source, self.target, self.activations
        own = list(map(_parameters_of, self.layers))

        def step(at: list[Tensor]) -> None:
            x = at[source]
            parameters = [of_layer[name] for of_layer in own for name in ("weight", "bias")]
            rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            rows = chain_of_layers(names, rows, parameters)
            at[target] = rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], rows.shape[-1])

        return step
