"""Repetition of features."""

from __future__ import annotations

from collections.abc import Sequence

from maze.core.annotations import override
from maze.perception.blocks.base import Keys, PerceptionBlock, TensorDict, axis_from_end


class RepeatToMatchBlock(PerceptionBlock):
    """Repeat the first input along one axis to the size of the second input there.

    An input with one dimension less than the second gets the axis first; otherwise its size there must be 1. Features
    `(f,)` next to `(n, g)` become `(n, f)` with `repeat_at_idx=1`, ready to be concatenated.

    :param in_keys: Key of the input to repeat, and key of the input to match.
    :param repeat_at_idx: The axis in the output; negative, or counted with one batch dimension at 0.
    :raises ConfigError: There is no such axis.
    """

    def __init__(
        self, in_keys: list[str], out_keys: Keys, in_shapes: Sequence[Sequence[int]], repeat_at_idx: int
    ) -> None:
        super().__init__(in_keys, out_keys, in_shapes)
        shape, reference = self.in_shapes
        self.repeat_at_idx = axis_from_end(self.block_name, "repeat_at_idx", repeat_at_idx, len(reference))
        self._adds_axis = len(shape) == len(reference) - 1

    @override(PerceptionBlock)
    def forward(self, block_input: TensorDict) -> TensorDict:
        tensor, reference = [block_input[key] for key in self.in_keys]
        if self._adds_axis:
            tensor = tensor.unsqueeze(self.repeat_at_idx)
        sizes = list(tensor.shape)
        sizes[self.repeat_at_idx] = reference.shape[self.repeat_at_idx]
        return {self.out_keys[0]: tensor.expand(sizes)}
