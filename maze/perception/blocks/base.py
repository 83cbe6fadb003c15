"""The interface of all perception blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from maze.core.errors import ConfigAssertionError, ConfigError

Keys: TypeAlias = str | list[str]
"""One key, or one per tensor."""
Shapes: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""One shape without batch dimension, or one per tensor."""
NonLinearity: TypeAlias = str | type[nn.Module]
"""An activation class, or its import path."""
TensorDict: TypeAlias = dict[str, torch.Tensor]

# Two, so that a function that drops axes of size one does not drop the batch.
_SHAPE_INFERENCE_BATCH = 2


class PerceptionBlock(ABC, nn.Module):
    """A network component from a dictionary of tensors to a dictionary of tensors.

    A block knows the shapes of its inputs, and infers those of its outputs, so that models can be derived from
    observation spaces. Shapes never include the batch dimension.

    A block whose `forward` is made of a few well-known operations says so by a method `describe_forward` (see
    :mod:`maze.perception.program.network_program`), and acts without the overhead of tensors. A class that replaces
    `forward` or `normalized_forward` is described only where it defines that method too.

    :param in_keys: Keys of the input tensors.
    :param out_keys: Keys of the output tensors.
    :param in_shapes: Shapes of the input tensors, in the order of `in_keys`.
    :raises ConfigError: A key is named twice, there is no output, or not one shape for each input.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes) -> None:
        nn.Module.__init__(self)
        self.in_keys: list[str] = [in_keys] if isinstance(in_keys, str) else list(in_keys)
        self.out_keys: list[str] = [out_keys] if isinstance(out_keys, str) else list(out_keys)
        self.in_shapes: list[Sequence[int]] = shape_list(in_shapes, n_keys=len(self.in_keys))
        self._out_shapes: list[Sequence[int]] | None = None

        for name, keys in (("in_keys", self.in_keys), ("out_keys", self.out_keys)):
            if len(set(keys)) != len(keys):
                raise ConfigAssertionError(
                    f"{self.block_name}: `{name}` {keys} holds a key twice; give each tensor its own key."
                )
        if not self.out_keys:
            raise ConfigAssertionError(f"{type(self).__name__}: `out_keys` is empty; name at least one output tensor.")
        if len(self.in_shapes) != len(self.in_keys):
            raise ConfigAssertionError(
                f"{self.block_name}: `in_shapes` must hold one shape for each of the {len(self.in_keys)} input keys "
                f"{self.in_keys}, found {len(self.in_shapes)}: {self.in_shapes}."
            )

    @abstractmethod
    def forward(self, block_input: TensorDict) -> TensorDict:
        """Computes the output tensors.

        :param block_input: Holds at least `in_keys`; each tensor has its shape of `in_shapes` behind any number of
            leading batch dimensions.
        :return: A tensor for each of `out_keys`, with the same leading batch dimensions.
        """

    def out_shapes(self) -> list[Sequence[int]]:
        """Shapes of the outputs without batch, in the order of `out_keys`; inferred once by a forward pass."""
        if self._out_shapes is None:
            self._out_shapes = self._infer_out_shapes()
        return list(self._out_shapes)

    def get_num_of_parameters(self) -> int:
        """Number of parameters; one that is shared within the block counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def block_name(self) -> str:
        """How messages name this block: its class and what it produces."""
        return f"{type(self).__name__} ({', '.join(self.out_keys)})"

    def gather_inputs(self, block_input: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """The input tensors in the order of `in_keys`.

        :raises ConfigError: One is missing.
        :return: Each `[batch, ...]` as the shape it was declared with says.
        """
        try:
            return [block_input[key] for key in self.in_keys]
        except KeyError as error:
            raise self.missing_input_error(block_input) from error

    def missing_input_error(self, block_input: Mapping[str, torch.Tensor]) -> ConfigError:
        """The error that names the input keys that are not there."""
        missing = [key for key in self.in_keys if key not in block_input]
        return ConfigAssertionError(
            f"{self.block_name}: expected the input keys {self.in_keys}, but {missing} "
            f"{'is' if len(missing) == 1 else 'are'} missing; found {list(block_input)}. "
            "Check the keys of the observation and the `out_keys` of the blocks before this one."
        )

    def __repr__(self) -> str:
        """The text in pictures of models: class, settings (`extra_repr`) and output shapes, line by line."""
        lines = [type(self).__name__, *filter(None, [self.extra_repr()]), f"Out Shapes: {self.out_shapes()}"]
        return "\n".join(lines)

    def _infer_out_shapes(self) -> list[Sequence[int]]:
        outputs = self._shape_inference_forward()
        if missing := [key for key in self.out_keys if key not in outputs]:
            raise ConfigAssertionError(
                f"{self.block_name}: the forward pass did not return the output keys {missing}; "
                f"it returned {list(outputs)}."
            )
        return [tuple(outputs[key].shape[1:]) for key in self.out_keys]

    def _shape_inference_forward(self) -> Mapping[str, torch.Tensor]:
        """One forward pass that leaves no trace: no gradients, evaluation mode, random state and modes restored."""
        tensor = next(self.parameters(), None)
        device = torch.device("cpu") if tensor is None else tensor.device
        dtype = tensor.dtype if tensor is not None and tensor.is_floating_point() else torch.get_default_dtype()
        # Ones are valid as features, as masks and as indices.
        dummy_input = {
            key: torch.ones(_SHAPE_INFERENCE_BATCH, *shape, device=device, dtype=dtype)
            for key, shape in zip(self.in_keys, self.in_shapes, strict=True)
        }
        in_training = [module for module in self.modules() if module.training]
        cuda_devices = [device] if device.type == "cuda" else []
        for module in in_training:
            module.training = False
        try:
            with torch.no_grad(), torch.random.fork_rng(cuda_devices):
                return self.forward(dummy_input)
        except RuntimeError as error:
            raise ConfigAssertionError(
                f"{self.block_name}: its layers cannot process inputs of the shapes "
                f"{dict(zip(self.in_keys, self.in_shapes, strict=True))}: {error}"
            ) from error
        finally:
            for module in in_training:
                module.training = True


def shape_list(in_shapes: Shapes, n_keys: int) -> list[Sequence[int]]:
    """One tuple of built-in integers per key, whether one shape or a sequence of shapes was given."""
    shapes: list[Any] = list(in_shapes)
    if not shapes:
        return [()] if n_keys == 1 else []  # the one shape of a scalar, or no shape at all
    if isinstance(shapes[0], Sequence | np.ndarray):
        return [tuple(int(size) for size in shape) for shape in shapes]
    return [tuple(int(size) for size in shapes)]
