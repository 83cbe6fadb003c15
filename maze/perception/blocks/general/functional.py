"""Functions as blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict


class FunctionalBlock(PerceptionBlock):
    """Apply a function.

    A block that is to be pickled needs a function of a module, not a lambda.

    :param func: Takes the input tensor, or with several `in_keys` the list of tensors. A function whose arguments
        have the names of the `in_keys` is called by these. Returns one tensor per output key.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, func: Callable[..., Any]) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        self.func = func
        try:
            self._is_called_by_name = set(self.in_keys) <= set(inspect.signature(func).parameters)
        except ValueError:  # some built-in functions have no signature
            self._is_called_by_name = False

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensors = [block_input[key] for key in self.in_keys]
        if self._is_called_by_name:
            result = self.func(**dict(zip(self.in_keys, tensors, strict=True)))
        else:
            result = self.func(tensors[0] if len(tensors) == 1 else tensors)
        outputs = [result] if isinstance(result, torch.Tensor) else list(result)
        return dict(zip(self.out_keys, outputs, strict=True))
