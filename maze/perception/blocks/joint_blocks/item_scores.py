"""Scores of items, for actions that choose one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.activations import activation_type
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict, shape_list
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.program.network_program import Array, Places, ProgramReader


class ItemScoresBlock(ShapeNormalizationBlock):
    """A score for each item, by the same layers for all of them, added to its logit where there are logits.

    What is learned about one item holds for every other that looks alike, wherever it stands (compare the pointer
    networks of Vinyals et al. 2015). Inputs: optionally logits `(batch, n)`; items `(batch, n, features)`, and any
    number of vectors `(batch, size)` that the score depends on besides. Output `(batch, n)`. Without logits the items
    may be more or fewer than in `in_shapes`.

    :param in_keys: Keys of the logits, if any, of the items and of the vectors.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation after each of them.
    :raises ConfigError: There are no vectors, no layers, or not as many logits as items.
    """

    def __init__(
        self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, hidden_units: Sequence[int], non_lin: NonLinearity
    ) -> None:
        shapes = shape_list(in_shapes, n_keys=1 if isinstance(in_keys, str) else len(in_keys))
        n_logits = int(len(shapes) > 1 and len(shapes[0]) < len(shapes[1]))
        n_vectors = len(shapes) - 1 - n_logits
        if n_vectors < 1 or not hidden_units:
            raise ConfigAssertionError(
                f"ItemScoresBlock ({out_keys}): expected the keys of logits, items and at least one vector, and one "
                f"width per layer; found {in_keys} and {list(hidden_units)}."
            )
        in_num_dims = [*[2] * n_logits, 3, *[2] * n_vectors]
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=in_num_dims, out_num_dims=2)
        self._n_logits = n_logits
        n_items, n_features = self.in_shapes[n_logits][-2:]
        if n_logits and self.in_shapes[0][-1] != n_items:
            raise ConfigAssertionError(
                f"{self.block_name}: {self.in_keys[0]!r} has {self.in_shapes[0][-1]} logits, {self.in_keys[1]!r} "
                f"{n_items} items."
            )
        activation = activation_type(non_lin, f"{self.block_name}.non_lin")
        # one layer of items and vectors side by side, without repeating the vectors for each item; in parts, so that
        # two numbers are heard at first beside a vector of a hundred
        self.item_layer = nn.Linear(n_features, hidden_units[0])
        self.vector_layers = nn.ModuleList(
            nn.Linear(shape[-1], hidden_units[0], bias=False) for shape in self.in_shapes[n_logits + 1 :]
        )
        layers: list[nn.Module] = [activation()]
        for n_in, n_out in pairwise(hidden_units):
            layers += [nn.Linear(n_in, n_out), activation()]
        self.hidden = nn.Sequential(*layers)
        self.score_layer = nn.Linear(hidden_units[-1], 1)

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        tensors = [block_input[key].float() for key in self.in_keys]
        logits, (items, *vectors) = tensors[: self._n_logits], tensors[self._n_logits :]
        of_vectors = [layer(vector) for layer, vector in zip(self.vector_layers, vectors, strict=True)]
        hidden = self.hidden(_ADDED_TO_ITEMS.in_torch(self.item_layer(items), *of_vectors))
        return {self.out_keys[0]: _ADDED_SCORES.in_torch(self.score_layer(hidden), *logits)}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        places = [inputs[key] for key in self.in_keys]
        logits, (items, *vectors) = places[: self._n_logits], places[self._n_logits :]
        of_vectors = [reader.layer(layer, vector) for layer, vector in zip(self.vector_layers, vectors, strict=True)]
        added = reader.apply(_ADDED_TO_ITEMS, reader.layer(self.item_layer, items), *of_vectors)
        scores = reader.layer(self.score_layer, reader.layer(self.hidden, added))
        return {self.out_keys[0]: reader.apply(_ADDED_SCORES, scores, *logits)}

    @override(ShapeNormalizationBlock)
    def extra_repr(self) -> str:
        widths = [layer.out_features for layer in (self.item_layer, *self.hidden) if isinstance(layer, nn.Linear)]
        items, *vectors = self.in_keys[self._n_logits :]
        return f"{items} with {', '.join(vectors)}\n({'->'.join(map(str, [*widths, 1]))})"


@dataclass(frozen=True)
class _AddedToItems:
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        items, *vectors = tensors
        return items + sum(vectors[1:], start=vectors[0]).unsqueeze(-2)

    def in_numpy(self, *arrays: Array) -> Array:
        items, *vectors = arrays
        added: Array = items + sum(vectors[1:], start=vectors[0])[..., None, :]
        return added


@dataclass(frozen=True)
class _AddedScores:
    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        scores = tensors[0].squeeze(-1)
        return scores + tensors[1] if len(tensors) == 2 else scores

    def in_numpy(self, *arrays: Array) -> Array:
        scores: Array = arrays[0][..., 0]
        return scores + arrays[1] if len(arrays) == 2 else scores


_ADDED_TO_ITEMS, _ADDED_SCORES = _AddedToItems(), _AddedScores()
