"""Activations of networks, by their names."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from maze.core.annotations import override
from maze.core.utils.factory import Factory

_MANY = 2**13
"""Numbers from which NumPy's tanh, called through Python, is faster than torch's."""


def activation_type(non_lin: str | type[nn.Module], config_path: str) -> type[nn.Module]:
    """Return the class of an activation; for `torch.nn.Tanh`, where torch is slow, a faster equivalent.

    :param non_lin: The class, or its name.
    :param config_path: Key of the configuration, for messages.
    :raises ConfigError: There is no such module.
    """
    found = Factory(nn.Module).type_from_name(non_lin, config_path=config_path)
    return Tanh if found is nn.Tanh and mkl_is_slow() else found


@cache
def mkl_is_slow() -> bool:
    """Return whether torch uses MKL on a processor of AMD, where it leaves half of the units or more unused."""
    mkl: Any = torch.backends.mkl
    find_out: Any = getattr(torch.cpu, "get_capabilities", None)
    return bool(mkl.is_available()) and find_out is not None and "AMD" in str(find_out().get("cpu_name"))


class Tanh(nn.Tanh):
    """Hyperbolic tangent by NumPy for many numbers, which takes a tenth of the time where MKL is slow."""

    @override(nn.Tanh)
    def forward(self, input: Tensor) -> Tensor:  # the name that torch gave it
        if not _is_plain(input) or input.numel() < _MANY or input.dtype != torch.float32:
            return torch.tanh(input)
        if input.requires_grad and torch.is_grad_enabled():
            result: Tensor = _TanhInNumpy.apply(input)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return result
        return _tanh_in_numpy(input)


class _TanhInNumpy(torch.autograd.Function):
    """With the derivative that torch computes from the result, which is fast."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = _tanh_in_numpy(x)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        of_x: Tensor = torch.ops.aten.tanh_backward(gradients[0], result)
        return of_x


def _tanh_in_numpy(x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    np.tanh(x.detach().numpy(), out=result.numpy())
    return result


def _is_plain(x: Tensor) -> bool:
    """Return whether the memory of a tensor can be read: it is on the CPU, and not traced, compiled or mapped."""
    is_traced: Any = torch.jit.is_tracing  # type: ignore[attr-defined]  # torch leaves it untyped
    if x.device.type != "cpu" or torch.compiler.is_compiling() or is_traced():
        return False
    try:
        return bool(x.data_ptr()) or not x.numel()
    except RuntimeError:  # inside of a transformation such as `vmap`
        return False
