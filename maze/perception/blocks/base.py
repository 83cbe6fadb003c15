"""Base classes of perception blocks."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError, ConfigError, unknown_key_error
from maze.perception.program.network_program import Array, Places, ProgramReader, UnreadableError

Keys: TypeAlias = str | list[str]
"""One key, or one per tensor."""
Shapes: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
"""One shape without batch dimension, or one per tensor."""
NonLinearity: TypeAlias = str | type[torch.nn.Module]
"""An activation class, or its import path."""
TensorDict: TypeAlias = dict[str, torch.Tensor]

# Two, so that a function that drops axes of size one does not drop the batch.
_SHAPE_INFERENCE_BATCH = 2
_COMMON_ARGUMENTS = ("in_keys", "out_keys", "in_shapes")
_SHOWN = (int, float, str, list, type, FunctionType)
# How layers of torch refuse their inputs.
_REFUSALS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


class PerceptionBlock(ABC, torch.nn.Module):
    """A network component that maps a dictionary of tensors to a dictionary of tensors.

    A block knows the shapes of its inputs and infers those of its outputs, so that models can be derived from
    observation spaces. Shapes never include the batch dimension.

    A block whose `forward` consists of a few known operations may define `describe_forward` (see
    :mod:`maze.perception.program.network_program`) and is then evaluated in NumPy, without the overhead of tensors. A
    subclass that replaces `forward` or `normalized_forward` has to define that method, too.

    :param in_keys: Keys of the input tensors.
    :param out_keys: Keys of the output tensors.
    :param in_shapes: Shapes of the input tensors, in the order of `in_keys`.
    :raises ConfigError: A key is named twice, there is no output, or not one shape for each input.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes) -> None:
        torch.nn.Module.__init__(self)
        self.in_keys: list[str] = key_list(in_keys)
        self.out_keys: list[str] = key_list(out_keys)
        self.in_shapes: list[Sequence[int]] = shape_list(in_shapes, n_keys=len(self.in_keys))
        self._out_shapes: list[Sequence[int]] | None = None

        for keys in (self.in_keys, self.out_keys):
            if len(set(keys)) != len(keys):
                raise ConfigAssertionError(f"{self.block_name}: {keys} holds a key twice; give each tensor its own.")
        if len(self.in_shapes) != len(self.in_keys):
            raise ConfigAssertionError(
                f"{self.block_name}: `in_shapes` must hold one shape for each of the {len(self.in_keys)} input keys "
                f"{self.in_keys}, found {len(self.in_shapes)}: {self.in_shapes}."
            )

    @abstractmethod
    def forward(self, block_input: TensorDict) -> TensorDict:
        """Compute the output tensors.

        :param block_input: Holds at least `in_keys`; each tensor has its shape of `in_shapes` behind any number of
            leading batch dimensions.
        :return: A tensor for each of `out_keys`, with the same leading batch dimensions.
        """

    def out_shapes(self) -> list[Sequence[int]]:
        """Return the shapes of the outputs without batch, in the order of `out_keys`; inferred by one forward pass."""
        if self._out_shapes is None:
            self._out_shapes = self._infer_out_shapes()
        return list(self._out_shapes)

    def get_num_of_parameters(self) -> int:
        """Return the number of parameters; shared parameters count once."""
        return sum(parameter.numel() for parameter in self.parameters())

    @property
    def block_name(self) -> str:
        """Name of the block in messages: its class and its outputs."""
        return f"{type(self).__name__} ({', '.join(self.out_keys)})"

    def __repr__(self) -> str:
        """Return the text in model graphs: class, settings (`extra_repr`) and output shapes, line by line."""
        lines = [type(self).__name__, *filter(None, [self.extra_repr()]), f"Out Shapes: {self.out_shapes()}"]
        return "\n".join(lines)

    def extra_repr(self) -> str:
        """Return the arguments of the block that are attributes of the same name: numbers, texts, lists, types."""
        own = [name for name in inspect.signature(type(self)).parameters if name not in _COMMON_ARGUMENTS]
        values = {name: vars(self)[name] for name in own if isinstance(vars(self).get(name), _SHOWN)}
        return ", ".join(f"{name}: {getattr(value, '__name__', value)}" for name, value in values.items())

    def _infer_out_shapes(self) -> list[Sequence[int]]:
        """Make one forward pass without side effects."""
        tensor = next(self.parameters(), torch.empty(0))
        # Ones are valid as features, as masks and as indices.
        dummy_input = {
            key: torch.ones(_SHAPE_INFERENCE_BATCH, *shape, device=tensor.device, dtype=tensor.dtype)
            for key, shape in zip(self.in_keys, self.in_shapes, strict=True)
        }
        try:
            with without_side_effects(self, [tensor.device] if tensor.is_cuda else []):
                outputs = self.forward(dummy_input)
        except ConfigError:
            raise
        except _REFUSALS as error:
            raise ConfigAssertionError(
                f"{self.block_name}: its layers cannot process inputs of the shapes "
                f"{dict(zip(self.in_keys, self.in_shapes, strict=True))}: {error}"
            ) from error
        shapes = {key: tuple(tensor.shape) for key, tensor in outputs.items()}
        if any(shapes.get(key, ())[:1] != (_SHAPE_INFERENCE_BATCH,) for key in self.out_keys):
            raise ConfigAssertionError(
                f"{self.block_name}: expected the output keys {self.out_keys} with the batch dimension first; for a "
                f"batch of {_SHAPE_INFERENCE_BATCH}, the forward pass returned tensors of the shapes {shapes}."
            )
        return [shapes[key][1:] for key in self.out_keys]


class FunctionBlock(PerceptionBlock, ABC):
    """Base of blocks that compute a function in torch and in NumPy.

    See :class:`maze.perception.program.network_program.Function`.
    """

    @abstractmethod
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        """Compute the output.

        :param tensors: The inputs `[..., *in_shape]` in the order of `in_keys`, which must not be modified.
        :return: `[..., *out_shape]`, with the leading batch dimensions of the inputs.
        """

    @abstractmethod
    def in_numpy(self, *arrays: Array) -> Array:
        """Compute the same for arrays.

        :param arrays: The inputs `[..., *in_shape]` in the order of `in_keys`, which must not be modified.
        """

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        return {self.out_keys[0]: self.in_torch(*(block_input[key] for key in self.in_keys))}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        if any(buffer.device.type != "cpu" for buffer in self.buffers()):
            raise UnreadableError
        return {self.out_keys[0]: reader.apply(self, *(inputs[key] for key in self.in_keys))}


class ChainBlock(PerceptionBlock):
    """Base of blocks that evaluate two blocks one after the other."""

    stages: ClassVar[tuple[str, str]]
    """Names of the attributes that hold the blocks."""

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        first, second = (getattr(self, name) for name in self.stages)
        output: TensorDict = second(first(block_input))
        return output

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        first, second = (getattr(self, name) for name in self.stages)
        return reader.module(second, reader.module(first, inputs))

    @override(PerceptionBlock)
    def extra_repr(self) -> str:
        return "\n".join(filter(None, (getattr(self, name).extra_repr() for name in self.stages)))


@contextmanager
def without_side_effects(network: torch.nn.Module, cuda_devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Return a context without gradients and in evaluation mode, which restores modes and random states.

    :param network: The network that is evaluated.
    :param cuda_devices: CUDA devices whose random states are restored.
    """
    in_training = [module for module in network.modules() if module.training]
    for module in in_training:
        module.training = False
    try:
        with torch.no_grad(), torch.random.fork_rng(cuda_devices):
            yield
    finally:
        for module in in_training:
            module.training = True


def key_list(keys: Keys) -> list[str]:
    """Return the keys as a list, also of a single key."""
    return [keys] if isinstance(keys, str) else list(keys)


def shape_list(in_shapes: Shapes, n_keys: int) -> list[Sequence[int]]:
    """Return the shapes as tuples of built-in integers, for one shape or a sequence of shapes.

    :param in_shapes: One shape, or a sequence of them. An empty sequence is the shape of a scalar if there is one key.
    :param n_keys: Number of keys. It is not compared with the number of shapes.
    """
    shapes: list[Any] = list(in_shapes)
    if not shapes:
        return [()] if n_keys == 1 else []  # the one shape of a scalar, or no shape at all
    if isinstance(shapes[0], Sequence | np.ndarray):
        return [tuple(int(size) for size in shape) for shape in shapes]
    return [tuple(int(size) for size in shapes)]


_POOLING: Mapping[str, Callable[..., torch.Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.amax,
    "min": torch.amin,
}


def pool(features: torch.Tensor, name: str, dims: Sequence[int], valid: torch.Tensor | None = None) -> torch.Tensor:
    """Pool the valid features over `dims`; zero where no feature is valid.

    :param features: The tensor to pool.
    :param name: `mean`, `sum`, `max` or `min`.
    :param dims: The axes to pool over, which the result no longer has.
    :param valid: Boolean, broadcastable to `features`.
    :return: The shape of `features` without the axes `dims`.
    :raises ConfigError: There is no such function.
    """
    if name not in _POOLING:
        raise unknown_key_error("pooling function", name, _POOLING)
    axes = tuple(dims)
    if valid is None:
        return _POOLING[name](features, axes)
    valid = valid.expand_as(features)
    n_valid = valid.sum(axes)
    if name in ("mean", "sum"):
        total = features.masked_fill(~valid, 0.0).sum(axes)
        return total if name == "sum" else total / n_valid.clamp(min=1).to(total.dtype)
    limits = torch.finfo(features.dtype)
    excluded = limits.min if name == "max" else limits.max
    return _POOLING[name](features.masked_fill(~valid, excluded), axes).masked_fill(n_valid == 0, 0.0)


def axis_from_end(block_name: str, argument: str, axis: int, n_dims: int) -> int:
    """Return the axis counted from the end (negative), valid for any number of leading batch dimensions.

    :param block_name: For the error message.
    :param argument: For the error message.
    :param axis: Negative: counted from the end. Otherwise counted with one batch dimension at 0.
    :param n_dims: Number of dimensions without batch.
    :raises ConfigError: There is no such axis, or it is the batch.
    """
    from_end = axis if axis < 0 else axis - (n_dims + 1)
    if not -n_dims <= from_end <= -1:
        raise ConfigAssertionError(
            f"{block_name}: `{argument}` must lie in [1, {n_dims}] (0 is the batch) or in [-{n_dims}, -1] for tensors "
            f"with {n_dims} dimensions (without batch), found {axis}."
        )
    return from_end
