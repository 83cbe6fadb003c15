"""Networks in torch that compute chains of linear layers and activations, and their gradients, in one function.

Small networks spend a third of an update on calls from module to module and on the nodes that autograd adds for each
layer, transposition and activation. The program of a network lists its layers. Where a run multiplies by oneDNN
(:func:`maze.core.agent.torch_model.fast_products`), large layers are one operation with their activation, and MKL
computes small products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from maze.perception import weight_init
from maze.perception.program.network_program import Apply, Linear, Place, Program, read_program

_Network = TypeVar("_Network", bound=nn.Module)
_Tensors = dict[str, Tensor]
_Step = Callable[[list[Tensor]], None]

_ACTIVATIONS: Mapping[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", weight_init.Tanh: "tanh"}
_DERIVATIVES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, y, out: torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=out),
    "tanh": lambda gradient, y, out: torch.ops.aten.tanh_backward.grad_input(gradient, y, grad_input=out),
}
_NO_ACTIVATION = "none"
_BY_MKL = "none"  # the precision with which MKL multiplies
_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch leaves it untyped
_fused_layer: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what Inductor calls on CPUs


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
            program = vars(network)["_in_torch"] = _ProgramInTorch()
        outputs: _Tensors | None = program.outputs(network, x)
        return forward(network, x) if outputs is None else outputs

    return evaluated


class _ProgramInTorch:
    """The program of a network, which is read at the first evaluation: copies of a network have other modules."""

    def __init__(self) -> None:
        self._program: Program | None = None
        self._steps: list[_Step] | None = None
        self._parameters: list[Mapping[str, Tensor]] = []
        self._is_read = False

    def __reduce__(self) -> Any:
        return _ProgramInTorch, ()

    def outputs(self, network: nn.Module, tensors: _Tensors) -> _Tensors | None:
        """Return the outputs by key; `None`: the network itself has to compute them.

        :param network: The network.
        :param tensors: Its inputs `[..., *shape]` by key.
        """
        if not self._is_read:
            self._program, self._is_read = read_program(network), True
            if self._program is not None:
                self._steps = _steps_of(self._program)
                self._parameters = [_parameters_of(layer) for layer in self._program.linear_layers]
        if self._program is None or self._steps is None:
            return None
        at: list[Any] = [None] * self._program.n_places
        for key, place in self._program.inputs.items():
            tensor = at[place] = tensors.get(key)
            if tensor is None or tensor.dtype is not torch.float32 or not weight_init.is_plain(tensor):
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
            layers, names = [*before.layers, operation.layer], [*before.activations, _NO_ACTIVATION]
        else:
            name = _ACTIVATIONS.get(type(operation.layer))
            if name is None or before.activations[-1:] != [_NO_ACTIVATION]:
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
            if torch.is_grad_enabled():
                rows = _Layers.apply(names, rows, *parameters)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            else:
                rows = _results(names, rows, parameters)[-1]
            at[target] = rows if x.dim() == 2 else rows.reshape(*x.shape[:-1], rows.shape[-1])

        return step


# -- chains -----------------------------------------------------------------------------------------------------------


class _Layers(torch.autograd.Function):
    """Linear layers with activations."""

    @staticmethod
    def forward(ctx: Any, names: Sequence[str], x: Tensor, *parameters: Tensor) -> Tensor:
        results = _results(names, x, parameters)
        ctx.names = names
        ctx.save_for_backward(*results, *parameters[::2])
        return results[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "Second derivatives (`create_graph=True`) are not available for dense networks. A subclass of "
                "the network with a `forward` of its own, such as `return super().forward(x)`, has them."
            )
        names, saved, (_, of_input, *of_parameters) = ctx.names, ctx.saved_tensors, ctx.needs_input_grad
        n, precision = len(names), _MATMUL.fp32_precision
        results, weights = saved[: n + 1], saved[n + 1 :]
        found: list[Tensor | None] = [None] * (2 * n)
        for index in range(n - 1, -1, -1):
            x, weight = results[index], weights[index]
            if names[index] != _NO_ACTIVATION:
                # except for that of the output, the memory of the gradient is used again
                out = gradient if index < n - 1 else torch.empty_like(gradient)
                gradient = _DERIVATIVES[names[index]](gradient, results[index + 1], out)
            if of_parameters[2 * index]:
                if weight.shape[0] > weight.shape[1]:  # the faster order of both factors
                    found[2 * index] = _product(x.t(), gradient, precision).t()
                else:
                    found[2 * index] = _product(gradient.t(), x, precision)
            if of_parameters[2 * index + 1]:
                found[2 * index + 1] = gradient.sum(0)
            if index or of_input:
                gradient = _product(gradient, weight, precision)
        return None, gradient if of_input else None, *found


def _product(first: Tensor, second: Tensor, precision: str) -> Tensor:
    if precision == _BY_MKL or first.numel() * second.shape[1] > weight_init.SMALL_PRODUCT:
        return torch.mm(first, second)
    _MATMUL.fp32_precision = _BY_MKL
    try:
        return torch.mm(first, second)
    finally:
        _MATMUL.fp32_precision = precision


def _results(names: Sequence[str], x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the input and the results of all layers, after their activations."""
    results, precision = [x], _MATMUL.fp32_precision
    by_onednn = precision != _BY_MKL and _fused_layer is not None
    if by_onednn:
        _MATMUL.fp32_precision = _BY_MKL  # small products; fused layers do not depend on it
    try:
        for name, weight, bias in zip(names, parameters[::2], parameters[1::2], strict=True):
            if by_onednn and x.numel() * weight.shape[0] > weight_init.SMALL_PRODUCT:
                x = _fused_layer(x, weight, bias, name, [], "")
            else:
                x = functional.linear(x, weight, bias)
                if name == "relu":
                    x.relu_()
                elif name == "tanh":
                    _tanh_(x)
            results.append(x)
    finally:
        if by_onednn:
            _MATMUL.fp32_precision = precision
    return results


def _tanh_(x: Tensor) -> None:
    if x.numel() >= weight_init.MANY and weight_init.mkl_is_slow():
        np.tanh(x.detach().numpy(), out=x.detach().numpy())
    else:
        x.tanh_()
