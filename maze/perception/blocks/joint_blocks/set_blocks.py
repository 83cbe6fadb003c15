"""Blocks for sets of items: attention over a varying number of items, and one score for each."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from maze.core.annotations import override
from maze.core.errors import ConfigAssertionError
from maze.perception.blocks.base import Keys, NonLinearity, Shapes, TensorDict, key_list, shape_list
from maze.perception.blocks.feed_forward.dense import DenseBlock
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.fast_layers import is_plain
from maze.perception.program.network_program import Array, ArrayFunction, FunctionPair, Place, Places, ProgramReader
from maze.perception.weight_init import activation_type

_T = TypeVar("_T")
# Score of a masked item; finite, so that the result is not NaN where all are masked.
_EXCLUDED = -1e30
# Products of a varying number of rows are padded to a multiple: oneDNN compiles a kernel for each number.
_ROWS_OF_PRODUCTS = 512
# Width of items from which maxima without indices are faster.
_WIDE = 32
MANY_ROWS = 4096
"""Number of rows of a batch below which gathering those that count costs more than it saves."""
SHARE_WORTH_IT = 0.75
"""Share of rows of the largest set of a batch up to which gathering is faster."""


class SetAttentionBlock(ShapeNormalizationBlock):
    """Encode a set of any number of items as one vector.

    Each item passes dense layers and attends to the others (residual connection). The output concatenates mean and
    maximum over all items. Inputs: items `(batch, n, features)` and optionally a mask `(batch, n)`, positive for items
    that exist. Output `(batch, 2 * hidden_units[-1])`; with `keep_places` the concatenated items follow, for actions
    that name the index of an item. Masked items count as zeros. Further masks `(batch, n)` select some of the items,
    such as the valid choices: mean and maximum over them follow.

    :param in_keys: Keys of the items and, optionally, of the masks.
    :param hidden_units: Width of each dense layer.
    :param num_heads: Number of attention heads; divides the last width. 0: no attention.
    :param keep_places: Whether the output includes the items in their order.
    :param non_lin: Activation after each layer.
    :param keep_items: Whether there is a second output `<out_key>_items`, `(batch, n, hidden_units[-1])`, with the
        encoding of each item.
    :raises ConfigError: A mask does not fit.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_units: Sequence[int],
        num_heads: int,
        keep_places: bool,
        non_lin: NonLinearity,
        keep_items: bool = False,
    ) -> None:
        n_masks, pooled = len(key_list(in_keys)) - 1, key_list(out_keys)[0]
        super().__init__(
            in_keys,
            [pooled, *([f"{pooled}_items"] if keep_items else [])],
            in_shapes,
            in_num_dims=[3, *[2] * n_masks],
            out_num_dims=[2, 3][: 1 + keep_items],
        )
        n_items = self.in_shapes[0][-2]
        for key, shape in zip(self.in_keys[1:], self.in_shapes[1:], strict=True):
            if shape[-1] != n_items:
                raise ConfigAssertionError(
                    f"{self.block_name}: the mask {key!r} must have an entry for each of the {n_items} items of "
                    f"{self.in_keys[0]!r}, found the shape {tuple(shape)}."
                )
        item = f"{self.out_keys[0]}_item"
        self.dense_block = DenseBlock("items", item, [self.in_shapes[0][-2:]], hidden_units, non_lin)
        width = self.dense_block.out_shapes()[0][-1]
        self.num_heads = num_heads
        self.keep_places = keep_places
        self.output_units = 2 * width * max(1, n_masks) + (n_items * self.in_shapes[0][-1] if keep_places else 0)
        self.attention = _Attention(num_heads) if num_heads else None
        if num_heads:  # layers of their own, which a program can read
            self.query_key_value = nn.Linear(width, 3 * width)
            self.attended = nn.Linear(width, width)

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        items = block_input[self.in_keys[0]].float()
        masks = [block_input[key] for key in self.in_keys[1:]]
        if masks:
            items = _PRESENT.in_torch(items, masks[0])
        (features,) = self.dense_block({"items": items}).values()
        if self.attention is not None:
            found = self.attention.in_torch(self.query_key_value(features), *masks[:1])
            features = features + self.attended(found)
        parts = _pooled(features, masks)
        if self.keep_places:
            parts.append(items.flatten(-2))
        pooled = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        return dict(zip(self.out_keys, (pooled, features), strict=False))

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        items, *masks = (inputs[key] for key in self.in_keys)
        if masks:
            items = reader.apply(_PRESENT, items, masks[0])
        features = reader.layer(self.dense_block.net, items)
        if self.attention is not None:
            found = reader.apply(self.attention, reader.layer(self.query_key_value, features), *masks[:1])
            features = reader.apply(_SUM, features, reader.layer(self.attended, found))
        pooling = ArrayFunction(_mean_and_max_in_numpy)
        of_each = [[mask] for mask in masks] or [[]]  # without masks, one pooling over all items
        parts = [reader.apply(pooling, features, *mask) for mask in of_each]
        if self.keep_places:
            parts.append(reader.flatten(items, 2))
        return dict(zip(self.out_keys, (reader.concatenate(parts, axis=-1), features), strict=False))


_SUM = ArrayFunction(operator.add)
# Items `[..., n, features]`, zeros where the mask `[..., n]` is not positive.
_PRESENT = FunctionPair(
    lambda items, mask: items * (mask > 0)[..., np.newaxis], lambda items, mask: items * (mask > 0).unsqueeze(-1)
)
_ADDED_TO_ITEMS = FunctionPair(
    lambda items, *vectors: items + reduce(operator.add, vectors)[..., None, :],
    lambda items, *vectors: items + reduce(operator.add, vectors).unsqueeze(-2),
)
_PRESENT_SCORES = FunctionPair(
    lambda scores, mask: np.where(mask > 0, scores, np.float32(0.0)), lambda scores, mask: scores * (mask > 0)
)


@dataclass(frozen=True)
class _Attention:
    """Self-attention (Vaswani et al. 2017, eq. 1): `[..., n, 3 * width]` to `[..., n, width]`.

    A mask `[..., n]` excludes items; where it excludes all, the result is meaningless.
    """

    n_heads: int

    def in_torch(self, *tensors: torch.Tensor) -> torch.Tensor:
        split = tensors[0].reshape(*tensors[0].shape[:-1], 3, self.n_heads, -1)
        query, key, value = split.transpose(-4, -2).unbind(-3)
        added = None
        if len(tensors) == 2:
            absent = (tensors[1] <= 0)[..., None, None, :]
            added = torch.zeros_like(absent, dtype=query.dtype).masked_fill(absent, _EXCLUDED)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=added)
        return found.transpose(-3, -2).flatten(-2)

    def in_numpy(self, *arrays: Array) -> Array:
        split = arrays[0].reshape(*arrays[0].shape[:-1], 3, self.n_heads, -1).swapaxes(-4, -2)
        query, key, value = (split[..., part, :, :] for part in range(3))
        scores = query @ key.swapaxes(-1, -2) / np.float32(math.sqrt(query.shape[-1]))
        if len(arrays) == 2:
            scores = np.where((arrays[1] <= 0)[..., None, None, :], np.float32(_EXCLUDED), scores)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        found = (weights / weights.sum(axis=-1, keepdims=True)) @ value
        joined: Array = found.swapaxes(-3, -2).reshape(*arrays[0].shape[:-1], -1)
        return joined


def _pooled(features: torch.Tensor, masks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return mean and maximum over all items, or over those that each mask allows; zeros where there is none."""
    if not masks:
        return [features.mean(-2), features.max(-2).values]
    valid = torch.stack([mask > 0 for mask in masks], dim=-2)
    pool: Any = _Pooling.apply if is_plain(features) and features.requires_grad else _Pooling.compute
    return [pool(features, valid)[0].flatten(-3)]


class _Pooling(torch.autograd.Function):
    """Mean and maximum over the valid items, with a derivative that touches all features once.

    torch takes twenty times as long for a maximum of wide items with its index as for the maximum alone, by which the
    places are found then. Equal maxima share the derivative.
    """

    @staticmethod
    def compute(features: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the result `[..., n_masks, 2, width]`, the weights of the means, and for each mask the indices of the
        maxima `[..., width]`, or the features, lowered where it is not positive, that they are found in.
        """
        counted = valid.to(features.dtype)
        n_valid = counted.sum(-1, keepdim=True)
        weights = counted / n_valid.clamp(min=1.0)
        excluded = (counted - 1.0) * torch.finfo(features.dtype).max
        lowered = (features + each.unsqueeze(-1) for each in excluded.unbind(-2))
        highest = [(each.amax(-2), each) if each.shape[-1] >= _WIDE else each.max(-2) for each in lowered]
        maxima = torch.stack([values for values, _ in highest], dim=-2).masked_fill(n_valid == 0, 0.0)
        return torch.stack([weights @ features, maxima], dim=-2), weights, [places for _, places in highest]

    @staticmethod
    def forward(ctx: Any, features: torch.Tensor, valid: torch.Tensor) -> tuple[torch.Tensor]:
        result, weights, places = _Pooling.compute(features, valid)
        pairs = zip(places, result[..., 1:, :].unbind(-3), strict=True)
        ctx.save_for_backward(weights, *(one.eq_(value) if one.is_floating_point() else one for one, value in pairs))
        return (result,)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        weights, *places = ctx.saved_tensors
        of_means, of_maxima = gradients[0].unbind(-2)
        of_features = weights.transpose(-1, -2) @ of_means
        for place, of_highest, own in zip(places, of_maxima.unbind(-2), weights.unbind(-2), strict=True):
            if place.dtype is torch.int64:
                of_places = (of_highest * own.any(-1, keepdim=True)).unsqueeze(-2)
                of_features.scatter_add_(-2, place.unsqueeze(-2), of_places)
            else:  # without valid items the result is 0, which equals no lowered feature
                of_features.addcmul_(place, (of_highest / place.sum(-2).clamp_(min=1.0)).unsqueeze(-2))
        return of_features, None


def _mean_and_max_in_numpy(features: Array, mask: Array | None = None) -> Array:
    if mask is None:
        return np.concatenate([features.mean(axis=-2), features.max(axis=-2)], axis=-1)
    valid = mask > 0
    n_valid = valid.sum(-1, keepdims=True)
    weights = (valid / np.maximum(n_valid, 1)).astype(features.dtype)
    mean = (weights[..., np.newaxis, :] @ features)[..., 0, :]
    excluded = np.where(valid, np.float32(0.0), np.finfo(np.float32).min)[..., np.newaxis]
    highest = (features + excluded).max(axis=-2)  # much faster than a reduction `where` items are valid
    return np.concatenate([mean, np.where(n_valid > 0, highest, np.float32(0.0))], axis=-1)


class GatheredRows:
    """Rows of sets in a program: those with a positive entry in any mask, and others up to a common number per set.

    :param reader: Reader of the program.
    :param masks: Places of the masks `[..., n]`.
    """

    def __init__(self, reader: ProgramReader, masks: Sequence[Place]) -> None:
        self._reader, self._mask = reader, masks[0]
        self._index = reader.apply(ArrayFunction(_first_rows), *masks)

    def of(self, source: Place) -> Place:
        """Return the rows that are kept.

        :param source: Place of `[..., n, features]` or `[..., n]`.
        :return: Place of `[..., n_kept, features]` or `[..., n_kept]`; all rows are kept where gathering is not faster.
        """
        return self._reader.apply(ArrayFunction(_taken), source, self._index, self._mask)

    def spread(self, source: Place, fill: float) -> Place:
        """Return numbers at the places before gathering; the inverse of :meth:`of`.

        :param source: Place of the numbers `[..., n_kept]`.
        :param fill: The number at the other places.
        :return: Place of `[..., n]`.
        """
        function = ArrayFunction(partial(_put_back, fill))
        return self._reader.apply(function, source, self._index, self._mask)


def _first_rows(*masks: Array) -> Array:
    """Return flat indices `[n_sets, n_kept]` of the rows to keep; without columns where gathering is not faster."""
    n = masks[0].shape[-1]
    counts = reduce(np.logical_or, [mask > 0 for mask in masks]).reshape(-1, n)
    n_kept = int(counts.sum(axis=1).max(initial=0))
    if counts.size < MANY_ROWS // 4 or not 0 < n_kept <= SHARE_WORTH_IT * n:
        return np.empty((len(counts), 0), np.intp)
    order: Array = np.argsort(~counts, axis=1, kind="stable")[:, :n_kept]
    order += n * np.arange(len(order))[:, np.newaxis]
    return order


def _taken(array: Array, index: Array, mask: Array) -> Array:
    if not index.size:
        return array
    rest = array.shape[mask.ndim :]
    rows: Array = array.reshape(-1, *rest).take(index, axis=0)
    return rows.reshape(*mask.shape[:-1], -1, *rest)


def _put_back(fill: float, scores: Array, index: Array, mask: Array) -> Array:
    if not index.size:
        return scores
    spread = np.full(mask.shape, fill, scores.dtype)
    spread.reshape(-1)[index.ravel()] = scores.ravel()
    return spread


class ItemScoresBlock(ShapeNormalizationBlock):
    """Score each item by the same layers and add the score to its logit, if there are logits.

    The scores are equivariant to the order of the items (compare the pointer networks of Vinyals et al. 2015). Inputs:
    optionally logits `(batch, n)`; items `(batch, n, features)`, and any number of further vectors `(batch, size)` that
    the score depends on. Output `(batch, n)`. Without logits the number of items may differ from `in_shapes`.

    :param in_keys: Keys of the logits, if any, of the items, of the vectors and of the mask, if any.
    :param hidden_units: Width of each dense layer.
    :param non_lin: Activation after each of them.
    :param has_mask: Whether the last key is that of a mask `(batch, n)`: items without a positive entry, such as those
        that may not be chosen, are not scored; their score is 0.
    :raises ConfigError: There are no vectors, no layers, or not as many logits as items.
    """

    def __init__(
        self,
        in_keys: Keys,
        out_keys: Keys,
        in_shapes: Shapes,
        hidden_units: Sequence[int],
        non_lin: NonLinearity,
        has_mask: bool = False,
    ) -> None:
        shapes = shape_list(in_shapes, n_keys=len(key_list(in_keys)))
        n_logits = int(len(shapes) > 1 and len(shapes[0]) < len(shapes[1]))
        n_vectors = len(shapes) - 1 - n_logits - has_mask
        if n_vectors < 1 or not hidden_units:
            raise ConfigAssertionError(
                f"ItemScoresBlock ({out_keys}): expected the keys of logits, items and at least one vector, and one "
                f"width per layer; found {in_keys} and {list(hidden_units)}."
            )
        in_num_dims = [*[2] * n_logits, 3, *[2] * (n_vectors + has_mask)]
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=in_num_dims, out_num_dims=2)
        self._n_logits, self._n_others = n_logits, len(self.in_keys) - has_mask
        n_items, n_features = self.in_shapes[n_logits][-2:]
        if n_logits and self.in_shapes[0][-1] != n_items:
            raise ConfigAssertionError(
                f"{self.block_name}: {self.in_keys[0]!r} has {self.in_shapes[0][-1]} logits, {self.in_keys[1]!r} "
                f"{n_items} items."
            )
        activation = activation_type(non_lin, f"{self.block_name}.non_lin")
        # one layer of concatenated items and vectors, without repeating the vectors for each item; separate layers, so
        # that the initial weights of a short vector are not small because another one is long
        self.item_layer = nn.Linear(n_features, hidden_units[0])
        self.vector_layers = nn.ModuleList(
            nn.Linear(shape[-1], hidden_units[0], bias=False) for shape in self.in_shapes[n_logits + 1 : self._n_others]
        )
        layers: list[nn.Module] = [activation()]
        for n_in, n_out in pairwise(hidden_units):
            layers += [nn.Linear(n_in, n_out), activation()]
        self.hidden = nn.Sequential(*layers)
        self.score_layer = nn.Linear(hidden_units[-1], 1)

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        logits, (items, *vectors), masks = self._parts([block_input[key].float() for key in self.in_keys])
        of_vectors = [layer(vector) for layer, vector in zip(self.vector_layers, vectors, strict=True)]
        if masks and is_plain(masks[0]) and masks[0].numel() >= MANY_ROWS:  # exported graphs cannot branch on sizes
            places = masks[0].flatten().gt(0).nonzero().squeeze(-1)
            rows = functional.pad(places, (0, -len(places) % _ROWS_OF_PRODUCTS))
            of_vectors = [each.index_select(0, rows // items.shape[-2]) for each in of_vectors]
            hidden = reduce(operator.add, of_vectors, self.item_layer(items.flatten(0, 1).index_select(0, rows)))
            scores = self.score_layer(self.hidden(hidden)).squeeze(-1)[: len(places)]
            scores = scores.new_zeros(masks[0].numel()).index_copy(0, places, scores).view_as(masks[0])
        else:
            hidden = self.hidden(_ADDED_TO_ITEMS.in_torch(self.item_layer(items), *of_vectors))
            scores = reduce(_PRESENT_SCORES.in_torch, masks, self.score_layer(hidden).squeeze(-1))
        return {self.out_keys[0]: reduce(operator.add, logits, scores)}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        logits, (items, *vectors), masks = self._parts([inputs[key] for key in self.in_keys])
        of_vectors = [reader.layer(layer, vector) for layer, vector in zip(self.vector_layers, vectors, strict=True)]
        gathered = None if reader.is_for_population or not masks else GatheredRows(reader, masks)
        items = items if gathered is None else gathered.of(items)
        added = reader.apply(_ADDED_TO_ITEMS, reader.layer(self.item_layer, items), *of_vectors)
        scores = reader.flatten(reader.layer(self.score_layer, reader.layer(self.hidden, added)), 2)
        scores = scores if gathered is None else gathered.spread(scores, fill=0.0)
        for mask in masks:
            scores = reader.apply(_PRESENT_SCORES, scores, mask)
        return {self.out_keys[0]: reader.apply(_SUM, scores, *logits) if logits else scores}

    def _parts(self, of_keys: list[_T]) -> tuple[list[_T], list[_T], list[_T]]:
        """Return logits, items with vectors, and masks."""
        return of_keys[: self._n_logits], of_keys[self._n_logits : self._n_others], of_keys[self._n_others :]
