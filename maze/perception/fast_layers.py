"""Layers and products of matrices that avoid slow operations of torch on CPUs (decision 0041).

torch multiplies by MKL, which leaves half of the units of AMD's processors unused. There, runs with large minibatches
multiply by oneDNN while they learn (:func:`fast_products`), and MKL computes products that are small or have a rare
number of rows. torch selects oneDNN where 16 bits are allowed; oneDNN uses 32 bits where no units for 16 exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from maze.core.annotations import override

# Multiplications up to which MKL is faster than oneDNN, and from which the change pays for a run.
_SMALL_PRODUCT, _LARGE_PRODUCT = 2**20, 2**22
# Numbers from which NumPy's tanh, called through Python, is faster than torch's where MKL is slow.
_MANY = 2**13
# Numbers of features up to which, and of rows from which, the gradient of weights by columns is faster.
_FEW, _ROWS = 24, 1024
_MATMUL: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # torch leaves it untyped
_BY_MKL, _BY_ONEDNN = "none", "bf16"
_fused_layer: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # what Inductor calls on CPUs


# -- MKL or oneDNN ----------------------------------------------------------------------------------------------------


@cache
def mkl_is_slow() -> bool:
    """Return whether torch uses MKL on a processor of AMD, where it leaves half of the units or more unused."""
    mkl: Any = torch.backends.mkl
    find_out: Any = getattr(torch.cpu, "get_capabilities", None)
    return bool(mkl.is_available()) and find_out is not None and "AMD" in str(find_out().get("cpu_name"))


@cache
def onednn_is_faster() -> bool:
    """Return whether MKL is slow on this processor, and oneDNN is as precise as MKL where 16 bits are allowed."""
    if not (mkl_is_slow() and torch.backends.mkldnn.is_available()):  # type: ignore[no-untyped-call]  # torch
        return False
    values = 1.0 + torch.arange(2**16, dtype=torch.float64).view(256, 256) / 2**20  # exact in 32 bits, not in 16
    with _products(_BY_ONEDNN):
        product = values.float() @ values.float()
    return torch.allclose(product.double(), values @ values, rtol=1e-5, atol=0.0)


def fast_products(parameters: Iterable[Tensor], n_rows: int) -> AbstractContextManager[None]:
    """Multiply matrices by oneDNN while networks learn, where MKL takes twice the time (processors of AMD).

    :param parameters: Parameters of the networks, each `[...]`.
    :param n_rows: Rows of a minibatch. If the product with the largest layer is small, MKL computes all products.
    """
    n_weights = max((each.numel() for each in parameters if each.ndim == 2 and each.device.type == "cpu"), default=0)
    return _products(_BY_ONEDNN) if n_rows * n_weights >= _LARGE_PRODUCT and onednn_is_faster() else nullcontext()


def products_of_rare_shapes() -> AbstractContextManager[None]:
    """Multiply matrices by MKL: oneDNN compiles a kernel for each number of rows, in a third of a millisecond."""
    return _products(_BY_MKL)


@contextmanager
def _products(precision: str) -> Iterator[None]:
    before = _MATMUL.fp32_precision
    _MATMUL.fp32_precision = precision
    try:
        yield
    finally:
        _MATMUL.fp32_precision = before


def _multiplied(precision: str, n: int, function: Callable[..., Tensor], *factors: Tensor) -> Tensor:
    """Call a product of `n` multiplications: by MKL if it is small, otherwise by the precision of the run."""
    if precision == _BY_MKL or n > _SMALL_PRODUCT:
        return function(*factors)
    _MATMUL.fp32_precision = _BY_MKL
    try:
        return function(*factors)
    finally:
        _MATMUL.fp32_precision = precision


# -- layers -----------------------------------------------------------------------------------------------------------


def is_plain(x: Tensor) -> bool:
    """Return whether the memory of a tensor can be read: it is on the CPU, and not traced, compiled or mapped."""
    is_traced: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch leaves it untyped
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_traced():
        return False
    try:
        return bool(x.data_ptr()) or not x.numel()
    except RuntimeError:  # inside of a transformation such as `vmap`
        return False


class Tanh(nn.Tanh):
    """Hyperbolic tangent by NumPy for many numbers, which takes a tenth of the time where MKL is slow."""

    @override(nn.Tanh)
    def forward(self, input: Tensor) -> Tensor:  # the name that torch gave it
        if not is_plain(input) or input.numel() < _MANY or input.dtype != torch.float32:
            return torch.tanh(input)
        result: Tensor = _TanhInNumpy.apply(input)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return result


class _TanhInNumpy(torch.autograd.Function):
    """With the derivative that torch computes from the result, which is fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=result.numpy())
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        of_x: Tensor = torch.ops.aten.tanh_backward(gradients[0], result)
        return of_x


class Linear(nn.Linear):
    """Linear layer with a fast gradient where there are many rows of few features, and fast small products.

    torch chooses the product for the gradient of the weights by their memory layout. With few features, that for
    weights by columns takes a quarter to two thirds of the time of that for weights by rows, as parameters are.
    """

    @override(nn.Linear)
    def forward(self, input: Tensor) -> Tensor:  # the name that torch gave it
        n_features, weight = self.in_features, self.weight
        if n_features <= _FEW and torch.is_grad_enabled() and is_plain(input) and input.numel() >= _ROWS * n_features:
            weight = weight.t().contiguous().t()
        n = input.numel() * self.out_features
        return _multiplied(_MATMUL.fp32_precision, n, functional.linear, input, weight, self.bias)


# -- chains of layers -------------------------------------------------------------------------------------------------

NO_ACTIVATION = "none"
ACTIVATIONS: Mapping[type[nn.Module], str] = {nn.ReLU: "relu", nn.Tanh: "tanh", Tanh: "tanh"}
"""Activations that a chain may have -> their names."""
_DERIVATIVES: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu": lambda gradient, y, out: torch.ops.aten.threshold_backward.grad_input(gradient, y, 0, grad_input=out),
    "tanh": lambda gradient, y, out: torch.ops.aten.tanh_backward.grad_input(gradient, y, grad_input=out),
}


def chain_of_layers(activations: Sequence[str], x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return the output of linear layers, each followed by an activation, as one function of autograd.

    :param activations: Name of the activation after each layer, or `NO_ACTIVATION`.
    :param x: Inputs, `[rows, features]`.
    :param parameters: Weights `[units, features]` and biases `[units]` of the layers, by turns.
    :return: `[rows, units]`.
    """
    if not torch.is_grad_enabled():
        return _results(activations, x, parameters)[-1]
    found: Tensor = _Chain.apply(activations, x, *parameters)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return found


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activations: Sequence[str], x: Tensor, *parameters: Tensor) -> Tensor:
        results = _results(activations, x, parameters)
        ctx.activations = activations
        ctx.save_for_backward(*results, *parameters[::2])
        return results[-1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "Second derivatives (`create_graph=True`) are not available for dense networks. A subclass of "
                "the network with a `forward` of its own, such as `return super().forward(x)`, has them."
            )
        names, saved, (_, of_input, *of_parameters) = ctx.activations, ctx.saved_tensors, ctx.needs_input_grad
        n, precision = len(names), _MATMUL.fp32_precision
        results, weights = saved[: n + 1], saved[n + 1 :]
        found: list[Tensor | None] = [None] * (2 * n)
        for index in range(n - 1, -1, -1):
            x, weight = results[index], weights[index]
            if names[index] != NO_ACTIVATION:
                # except for that of the output, the memory of the gradient is used again
                out = gradient if index < n - 1 else torch.empty_like(gradient)
                gradient = _DERIVATIVES[names[index]](gradient, results[index + 1], out)
            size = x.numel() * weight.shape[0]  # of all three products
            if of_parameters[2 * index]:
                if weight.shape[0] > weight.shape[1]:  # the faster order of both factors
                    found[2 * index] = _multiplied(precision, size, torch.mm, x.t(), gradient).t()
                else:
                    found[2 * index] = _multiplied(precision, size, torch.mm, gradient.t(), x)
            if of_parameters[2 * index + 1]:
                found[2 * index + 1] = gradient.sum(0)
            if index or of_input:
                gradient = _multiplied(precision, size, torch.mm, gradient, weight)
        return None, gradient if of_input else None, *found


def _results(activations: Sequence[str], x: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the input and the results of all layers, after their activations."""
    results, precision = [x], _MATMUL.fp32_precision
    by_onednn = precision != _BY_MKL and _fused_layer is not None
    if by_onednn:
        _MATMUL.fp32_precision = _BY_MKL  # small products; fused layers do not depend on it
    try:
        for name, weight, bias in zip(activations, parameters[::2], parameters[1::2], strict=True):
            if by_onednn and x.numel() * weight.shape[0] > _SMALL_PRODUCT:
                x = _fused_layer(x, weight, bias, name, [], "")
            else:
                x = functional.linear(x, weight, bias)
                if name == "relu":
                    x.relu_()
                elif name == "tanh" and x.numel() >= _MANY and mkl_is_slow():
                    np.tanh(x.detach().numpy(), out=x.detach().numpy())
                elif name == "tanh":
                    x.tanh_()
            results.append(x)
    finally:
        if by_onednn:
            _MATMUL.fp32_precision = precision
    return results
