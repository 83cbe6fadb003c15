"""Functions as blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict


class FunctionalBlock(PerceptionBlock):
    """Apply a function.

    A block that is to be pickled needs a function of a module, not a lambda.

    :param func: Takes the input tensor, or with several `in_keys` the list of tensors. A function whose arguments
        have the names of the `in_keys` is called by these; another one that cannot be called with one argument gets
        one argument per tensor. Returns one tensor per output key.
    :raises ConfigError: It is not a function.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, func: Callable[..., Any]) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        if not callable(func):
            raise ConfigAssertionError(f"{self.block_name}: `func` must be callable, found {func!r}.")
        self.func = func
        self._is_called_by_name = _binds_by_name(func, self.in_keys)
        self._one_argument_each = len(self.in_keys) == 1 or _takes_one_argument_each(func, len(self.in_keys))

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensors = self.gather_inputs(block_input)
        if self._is_called_by_name:
            result = self.func(**dict(zip(self.in_keys, tensors, strict=True)))
        else:
            result = self.func(*tensors) if self._one_argument_each else self.func(tensors)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        if len(outputs) != len(self.out_keys):
            raise ConfigAssertionError(
                f"{self.block_name}: `func` must return one tensor for each of {self.out_keys}, found {len(outputs)}."
            )
        return dict(zip(self.out_keys, outputs, strict=True))


def _binds_by_name(func: Callable[..., Any], names: Sequence[str]) -> bool:
    try:
        signature = inspect.signature(func)
        signature.bind(**dict.fromkeys(names))
    except (TypeError, ValueError):
        return False
    return set(names) <= set(signature.parameters)


def _takes_one_argument_each(func: Callable[..., Any], n_tensors: int) -> bool:
    try:
        signature = inspect.signature(func)
    except ValueError:  # some built-in functions have no signature
        return False
    is_variadic = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values())
    return (is_variadic or not _binds(signature, 1)) and _binds(signature, n_tensors)


def _binds(signature: inspect.Signature, n_arguments: int) -> bool:
    try:
        signature.bind(*[None] * n_arguments)
    except TypeError:
        return False
    return True
