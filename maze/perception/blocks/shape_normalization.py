"""Blocks that fold leading batch dimensions into one, and unfold them again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, PerceptionBlock, Shapes, TensorDict


class ShapeNormalizationBlock(PerceptionBlock, ABC):
    """Base class of blocks whose layers expect a fixed number of dimensions, exactly one of them the batch.

    :meth:`forward` accepts any number of leading batch dimensions, none included: they are folded into one for
    :meth:`normalized_forward` and restored afterwards.

    :param in_num_dims: Number of dimensions, including one batch dimension, that the layers expect of each input (one
        number for all inputs, or one each).
    :param out_num_dims: Number of dimensions, including one batch dimension, that the layers return for each output.
    :raises ConfigError: There is not one number for each key, or an input has too few dimensions.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        in_num_dims: int | Sequence[int],
        out_num_dims: int | Sequence[int],
    ) -> None:
        super().__init__(in_keys=in_keys, out_keys=out_keys, in_shapes=in_shapes)
        self.in_num_dims = self._one_per_key("in_num_dims", in_num_dims, self.in_keys)
        self.out_num_dims = self._one_per_key("out_num_dims", out_num_dims, self.out_keys)
        # What `forward` compares with, kept as tuples: it is on the hot path of every policy.
        self._in_dims = tuple(zip(self.in_keys, self.in_num_dims, strict=True))
        if any(len(shape) + 1 < n_dims for shape, n_dims in zip(self.in_shapes, self.in_num_dims, strict=True)):
            raise ConfigAssertionError(
                f"{self.block_name}: expected inputs with at least {[n - 1 for n in self.in_num_dims]} dimensions "
                f"(without batch), found the shapes {dict(zip(self.in_keys, self.in_shapes, strict=True))}."
            )

    @abstractmethod
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        """Compute the output tensors of inputs with exactly one batch dimension.

        :param block_input: Holds exactly `in_keys`, each tensor with its number of `in_num_dims` dimensions.
        :return: A tensor for each of `out_keys`, with its number of `out_num_dims` dimensions.
        """

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        for key, num_dims in self._in_dims:
            if block_input[key].dim() != num_dims:
                return self._fold_and_unfold(block_input)
        if len(block_input) != len(self._in_dims):
            block_input = {key: block_input[key] for key in self.in_keys}
        return self.normalized_forward(block_input)

    @override(PerceptionBlock)
    def _infer_out_shapes(self) -> list[Sequence[int]]:
        out_shapes = super()._infer_out_shapes()
        # More dimensions than declared belong to further batch dimensions within the input shapes.
        if any(len(shape) + 1 < n_dims for shape, n_dims in zip(out_shapes, self.out_num_dims, strict=True)):
            raise ConfigAssertionError(
                f"{self.block_name}: `out_num_dims`, including one batch dimension, is {self.out_num_dims}, but the "
                f"layers return the shapes {out_shapes} behind the batch dimension."
            )
        return out_shapes

    def _fold_and_unfold(self, block_input: Mapping[str, torch.Tensor]) -> TensorDict:
        folded: TensorDict = {}
        batch_shapes = []  # no set: hashing a shape would fix its batch dimension in exported graphs
        for key, num_dims in self._in_dims:
            tensor = block_input[key]
            n_batch_dims = tensor.dim() - num_dims + 1
            batch_shapes.append(tensor.shape[:n_batch_dims] if n_batch_dims >= 0 else None)
            folded[key] = tensor.flatten(0, n_batch_dims - 1) if n_batch_dims > 0 else tensor.unsqueeze(0)
        batch_shape = batch_shapes[0]
        if batch_shape is None or any(other != batch_shape for other in batch_shapes):
            raise ConfigAssertionError(
                f"{self.block_name}: expected {self.in_num_dims} dimensions (one of them the batch) behind the same "
                f"leading batch dimensions, found { {key: tuple(block_input[key].shape) for key in self.in_keys} }."
            )
        outputs = self.normalized_forward(folded)
        return {key: outputs[key].reshape(batch_shape + outputs[key].shape[1:]) for key in self.out_keys}

    def _one_per_key(self, name: str, value: int | Sequence[int], keys: Sequence[str]) -> list[int]:
        num_dims = [value] * len(keys) if isinstance(value, int) else [int(entry) for entry in value]
        if len(num_dims) != len(keys) or min(num_dims, default=1) < 1:
            raise ConfigAssertionError(
                f"{self.block_name}: `{name}` must be one positive number or one for each of {list(keys)}, "
                f"found {value}."
            )
        return num_dims
