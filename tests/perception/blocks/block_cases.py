"""Every block with random settings and shapes, for the tests that hold for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from maze.core.utils.stats_utils import CumulativeMovingMeanStd
from maze.perception import blocks
from maze.perception.blocks import PerceptionBlock

SMALL = st.integers(2, 5)
CELLS = ["lstm", "gru"]


def add_and_scale(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """A function of two tensors with two results."""
    return [tensors[0] + tensors[1], 2.0 * tensors[0]]


class DictNet(nn.Module):
    """A plain network as the documentation writes it."""

    def __init__(self, n_in: int) -> None:
        super().__init__()
        self.layer = nn.Linear(n_in, 3)

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"out": self.layer(x["x"])}


def sizes(data: st.DataObject, n_dims: int) -> tuple[int, ...]:
    return tuple(data.draw(SMALL) for _ in range(n_dims))


def widths(data: st.DataObject) -> list[int]:
    return data.draw(st.lists(SMALL, min_size=1, max_size=3))


def dense(data: st.DataObject) -> PerceptionBlock:
    return blocks.DenseBlock("x", "out", sizes(data, data.draw(st.integers(1, 2))), widths(data), "torch.nn.Tanh")


def linear_output(data: st.DataObject) -> PerceptionBlock:
    return blocks.LinearOutputBlock("x", "out", sizes(data, 1), data.draw(SMALL))


def gaussian_output(data: st.DataObject) -> PerceptionBlock:
    return blocks.GaussianOutputBlock("x", "out", sizes(data, 1), data.draw(SMALL), log_std=-0.5)


def running_normalization(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, data.draw(st.integers(0, 3)))
    block = blocks.RunningNormalizationBlock("x", "out", [shape], clip=2.0)
    observed = CumulativeMovingMeanStd(epsilon=0.0)
    observed.update(np.random.default_rng(1).normal(1.0, 2.0, (7, *shape)))
    block.learn(observed)
    return block


def torch_model(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, 1)
    return blocks.TorchModelBlock("x", "out", shape, in_num_dims=[2], out_num_dims=2, net=DictNet(shape[0]))


def vgg(data: st.DataObject) -> PerceptionBlock:
    return blocks.VGGConvolutionBlock("x", "out", (data.draw(SMALL), *vgg_image(data)), [2, 3], nn.Tanh)


def vgg_image(data: st.DataObject) -> tuple[int, int]:
    return data.draw(st.integers(4, 9)), data.draw(st.integers(4, 9))


def vgg_dense(data: st.DataObject) -> PerceptionBlock:
    return blocks.VGGConvolutionDenseBlock("x", "out", (2, *vgg_image(data)), [2, 3], widths(data), nn.Tanh)


def vgg_gap(data: st.DataObject) -> PerceptionBlock:
    return blocks.VGGConvolutionGAPBlock("x", "out", (2, *vgg_image(data)), [2, 3], nn.Tanh)


def strided_settings(data: st.DataObject) -> tuple[int, dict[str, object]]:
    n_dims = data.draw(st.integers(1, 3))
    return n_dims, {
        "hidden_channels": [2, 3],
        "hidden_kernels": [data.draw(st.sampled_from([1, 2, (2,) * n_dims])), 2],
        "convolution_dimension": n_dims,
        "hidden_strides": data.draw(st.sampled_from([None, [2, 1], [(1,) * n_dims, 2]])),
        "hidden_dilations": data.draw(st.sampled_from([None, [1, 2]])),
        "hidden_padding": data.draw(st.sampled_from([None, [1, 0], [1, (1,) * n_dims]])),
        "padding_mode": data.draw(st.sampled_from([None, "zeros", "circular"])),
        "non_lin": nn.Tanh,
    }


def strided(data: st.DataObject) -> PerceptionBlock:
    n_dims, settings = strided_settings(data)
    shape = (2, *(data.draw(st.integers(7, 9)) for _ in range(n_dims)))
    return blocks.StridedConvolutionBlock("x", "out", shape, **settings)  # type: ignore[arg-type]


def strided_dense(data: st.DataObject) -> PerceptionBlock:
    n_dims, settings = strided_settings(data)
    shape = (2, *(data.draw(st.integers(7, 9)) for _ in range(n_dims)))
    return blocks.StridedConvolutionDenseBlock("x", "out", shape, hidden_units=[4], **settings)  # type: ignore[arg-type]


def graph_conv(data: st.DataObject) -> PerceptionBlock:
    n_nodes, n_features = sizes(data, 2)
    preprocess = data.draw(st.booleans())
    return blocks.GraphConvBlock(
        ["x", "adjacency"],
        "out",
        [(n_nodes, n_features), (n_nodes, n_nodes)],
        hidden_features=[3, 4],
        bias=data.draw(st.sampled_from([True, [True, False]])),
        non_lins=data.draw(st.sampled_from([nn.Tanh, "torch.nn.Tanh", [nn.Tanh, nn.Identity]])),
        node_self_importance=1.5,
        trainable_node_self_importance=preprocess and data.draw(st.booleans()),
        preprocess_adj=preprocess,
    )


def graph_attention(data: st.DataObject) -> PerceptionBlock:
    n_nodes, n_features = sizes(data, 2)
    return blocks.GraphAttentionBlock(
        ["x", "adjacency"],
        "out",
        [(n_nodes, n_features), (n_nodes, n_nodes)],
        hidden_features=[3, 4],
        non_lins=nn.Tanh,
        n_heads=data.draw(st.sampled_from([1, [2, 3]])),
        attention_alpha=0.2,
        avg_last_head_attentions=data.draw(st.booleans()),
        attention_dropout=0.0,
    )


def multi_head_attention(data: st.DataObject) -> PerceptionBlock:
    n_queries, n_keys, kdim, vdim = sizes(data, 4)
    n_heads = data.draw(st.integers(1, 3))
    embed_dim = n_heads * data.draw(SMALL)
    mask = data.draw(st.sampled_from([None, "padding", "attention"]))
    mask_shape = {None: [], "padding": [(n_keys,)], "attention": [(n_queries, n_keys)]}[mask]
    return blocks.MultiHeadAttentionBlock(
        ["query", "key", "value"] + ["mask"] * (mask is not None),
        data.draw(st.sampled_from(["out", ["out", "weights"]])),
        [(n_queries, embed_dim), (n_keys, kdim), (n_keys, vdim), *mask_shape],
        num_heads=n_heads,
        dropout=None,
        add_input_to_output=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
        add_bias_kv=False,
        add_zero_attn=data.draw(st.booleans()) and mask is None,
        kdim=None,
        vdim=vdim,
        use_key_padding_mask=mask == "padding",
    )


def point_net(data: st.DataObject) -> PerceptionBlock:
    n_points, n_features = sizes(data, 2)
    is_masked = data.draw(st.booleans())
    return blocks.PointNetFeatureBlock(
        ["x", "mask"] if is_masked else "x",
        "out",
        [(n_points, n_features), (n_points,)] if is_masked else (n_points, n_features),
        embedding_dim=data.draw(SMALL),
        pooling_func_name=data.draw(st.sampled_from(["max", "mean", "sum", "min"])),
        use_feature_transform=data.draw(st.booleans()),
        use_batch_norm=data.draw(st.booleans()),
        non_lin=nn.Tanh,
    )


def lstm(data: st.DataObject) -> PerceptionBlock:
    return blocks.LSTMBlock(
        "x", "out", sizes(data, 2), data.draw(SMALL), data.draw(st.integers(1, 2)), data.draw(st.booleans()), nn.Tanh
    )


def lstm_last_step(data: st.DataObject) -> PerceptionBlock:
    return blocks.LSTMLastStepBlock("x", "out", sizes(data, 2), data.draw(SMALL), 1, data.draw(st.booleans()), nn.Tanh)


def recurrent_cell(data: st.DataObject) -> PerceptionBlock:
    return blocks.RecurrentCellBlock("x", "out", sizes(data, 1), data.draw(SMALL), data.draw(st.sampled_from(CELLS)))


def flatten(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, data.draw(st.integers(0, 3)))
    return blocks.FlattenBlock("x", "out", shape, data.draw(st.integers(0, len(shape))))


def flatten_dense(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, data.draw(st.integers(1, 3)))
    return blocks.FlattenDenseBlock("x", "out", shape, len(shape), widths(data), nn.Tanh)


def correlation(data: st.DataObject) -> PerceptionBlock:
    n_items, n_features = sizes(data, 2)
    shapes = [(n_items, n_features), (data.draw(st.sampled_from([1, n_items])), n_features)]
    return blocks.CorrelationBlock(["x", "y"], "out", shapes, reduce=data.draw(st.booleans()))


def category_encoding(data: st.DataObject) -> PerceptionBlock:
    shape = data.draw(st.sampled_from([(), (2,), (2, 2)]))
    n_categories = data.draw(st.sampled_from([3, [2, 3, 1, 4][: int(torch.Size(shape).numel())]]))
    embedding_dim = data.draw(st.sampled_from([None, 2]))
    shape = (*data.draw(st.sampled_from([(), (3,)])), *shape) if isinstance(n_categories, list) else shape
    return blocks.CategoryEncodingBlock("category", "out", [shape], n_categories, embedding_dim)


def image_dense(data: st.DataObject) -> PerceptionBlock:
    layout = data.draw(st.sampled_from(["HW", "HWC", "CHW"]))
    shape = {"HW": (6, 7), "HWC": (6, 7, 3), "CHW": (3, 6, 7)}[layout]
    return blocks.ImageDenseBlock(
        "x", "out", shape, layout, 0.5, [2, 3], [3, 2], data.draw(st.sampled_from([None, [2, 1]])), [1, 0], [4], nn.Tanh
    )


def set_attention(data: st.DataObject) -> PerceptionBlock:
    n_items, n_features, head_dim = sizes(data, 3)
    masks = ["mask", "allowed"][: data.draw(st.integers(0, 2))]
    shape = (n_items, n_features)
    return blocks.SetAttentionBlock(
        ["x", *masks] if masks else "x",
        "out",
        [shape, *[(n_items,)] * len(masks)] if masks else shape,
        hidden_units=[3, 2 * head_dim],
        num_heads=data.draw(st.sampled_from([0, 2])),
        keep_places=data.draw(st.booleans()),
        non_lin=nn.Tanh,
        keep_items=data.draw(st.booleans()),
    )


def scaling(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, data.draw(st.integers(0, 3)))
    factors = [[0.5] * shape[-1]] if shape else []
    return blocks.ScalingBlock("x", "out", [shape], data.draw(st.sampled_from([0.01, *factors])))


def item_scores(data: st.DataObject) -> PerceptionBlock:
    n_items, n_features, *widths = sizes(data, data.draw(st.integers(3, 4)))
    vectors = {f"vector{index}": (width,) for index, width in enumerate(widths)}
    logits = {"logits": (n_items,)} if data.draw(st.booleans()) else {}
    mask = {"mask": (n_items,)} if data.draw(st.booleans()) else {}
    inputs = {**logits, "items": (n_items, n_features), **vectors, **mask}
    keys, shapes, hidden_units = list(inputs), list(inputs.values()), data.draw(st.sampled_from([[3], [3, 2]]))
    return blocks.ItemScoresBlock(keys, "out", shapes, hidden_units, nn.Tanh, has_mask=bool(mask))


def concatenation(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, data.draw(st.integers(1, 3)))
    axis = data.draw(st.integers(0, len(shape) - 1))
    shapes = [(*shape[:axis], data.draw(SMALL), *shape[axis + 1 :]) for _ in range(data.draw(st.integers(1, 3)))]
    concat_dim = data.draw(st.sampled_from([axis + 1, axis - len(shape)]))
    return blocks.ConcatenationBlock([f"x{index}" for index in range(len(shapes))], "out", shapes, concat_dim)


def functional(data: st.DataObject) -> PerceptionBlock:
    if data.draw(st.booleans()):
        return blocks.FunctionalBlock("x", "out", sizes(data, 2), torch.tanh)
    return blocks.FunctionalBlock(["x", "y"], ["sum", "double"], [sizes(data, 1)] * 2, add_and_scale)


def global_average_pooling(data: st.DataObject) -> PerceptionBlock:
    return blocks.GlobalAveragePoolingBlock("x", "out", sizes(data, 3))


def masked_global_pooling(data: st.DataObject) -> PerceptionBlock:
    n_items, n_features = sizes(data, 2)
    return blocks.MaskedGlobalPoolingBlock(
        ["x", "mask"],
        "out",
        [(n_items, n_features), data.draw(st.sampled_from([(n_items,), (n_items, n_features)]))],
        pooling_func=data.draw(st.sampled_from(["mean", "sum", "max", "min"])),
        pooling_dim=data.draw(st.sampled_from([1, -2, -1, [-1, -2]])),
    )


def multi_index_slicing(data: st.DataObject) -> PerceptionBlock:
    return blocks.MultiIndexSlicingBlock(
        "x", "out", sizes(data, 2), data.draw(st.sampled_from([1, 2, -1, -2])), data.draw(st.sampled_from([0, [1, -1]]))
    )


def repeat_to_match(data: st.DataObject) -> PerceptionBlock:
    n_items, n_features, n_other = sizes(data, 3)
    shape = data.draw(st.sampled_from([(n_features,), (1, n_features)]))
    return blocks.RepeatToMatchBlock(
        ["x", "y"], "out", [shape, (n_items, n_other)], data.draw(st.sampled_from([1, -2]))
    )


def self_attention_conv(data: st.DataObject) -> PerceptionBlock:
    shape = sizes(data, 3)
    is_masked = data.draw(st.booleans())
    block = blocks.SelfAttentionConvBlock(
        ["x", "mask"] if is_masked else "x",
        data.draw(st.sampled_from(["out", ["out", "weights"]])),
        [shape, shape[1:]] if is_masked else shape,
        embed_dim=data.draw(SMALL),
        dropout=None,
        add_input_to_output=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
    )
    if block.add_input_to_output:
        nn.init.ones_(block.gamma)  # at its start, 0, no gradient passes
    return block


def self_attention_seq(data: st.DataObject) -> PerceptionBlock:
    n_elements, head_dim = sizes(data, 2)
    is_masked = data.draw(st.booleans())
    shape = (n_elements, 2 * head_dim)
    return blocks.SelfAttentionSeqBlock(
        ["x", "mask"] if is_masked else "x",
        data.draw(st.sampled_from(["out", ["out", "weights"]])),
        [shape, (n_elements,)] if is_masked else shape,
        num_heads=2,
        dropout=0.0,
        add_input_to_output=data.draw(st.booleans()),
        bias=data.draw(st.booleans()),
    )


def slice_block(data: st.DataObject) -> PerceptionBlock:
    return blocks.SliceBlock(
        "x", "out", sizes(data, 2), data.draw(st.sampled_from([1, 2, -1, -2])), data.draw(st.sampled_from([0, 1, -1]))
    )


def action_masking(data: st.DataObject) -> PerceptionBlock:
    n_actors, n_actions = sizes(data, 2)
    logits, mask, actors, actions = data.draw(
        st.sampled_from(
            [
                ((n_actions,), (n_actions,), 1, None),
                ((n_actors * n_actions,), (n_actors * n_actions,), n_actors, n_actions),
                ((n_actors * n_actions,), (n_actions,), n_actors, n_actions),
                ((n_actors, n_actions), (n_actors, n_actions), n_actors, n_actions),
                ((n_actors, n_actions), (n_actions,), n_actors, n_actions),
                ((2 + 3 + 4,), (2 + 3 + 4,), 3, [2, 3, 4]),
            ]
        )
    )
    return blocks.ActionMaskingBlock(["logits", "mask"], "out", [logits, mask], actors, actions)


def inference(data: st.DataObject) -> PerceptionBlock:
    n_features = data.draw(SMALL)
    latent = blocks.DenseBlock("x", "latent", (n_features,), widths(data), nn.Tanh)
    other = blocks.FlattenDenseBlock("y", "other", (2, 3), 2, [3], nn.Tanh)
    joint = blocks.ConcatenationBlock(["latent", "other"], "joint", latent.out_shapes() + other.out_shapes(), -1)
    action = blocks.LinearOutputBlock("joint", "action", joint.out_shapes(), 4)
    value = blocks.LinearOutputBlock("joint", "value", joint.out_shapes(), 1)
    return blocks.InferenceBlock(
        ["x", "y"],
        ["action", "value", "joint"],
        [(n_features,), (2, 3)],
        {block.out_keys[0]: block for block in (value, action, joint, other, latent)},
    )


CASES: dict[str, Callable[[st.DataObject], PerceptionBlock]] = {
    "action_masking": action_masking,
    "category_encoding": category_encoding,
    "concatenation": concatenation,
    "correlation": correlation,
    "dense": dense,
    "flatten": flatten,
    "flatten_dense": flatten_dense,
    "functional": functional,
    "global_average_pooling": global_average_pooling,
    "graph_attention": graph_attention,
    "graph_conv": graph_conv,
    "image_dense": image_dense,
    "item_scores": item_scores,
    "scaling": scaling,
    "inference": inference,
    "linear_output": linear_output,
    "gaussian_output": gaussian_output,
    "running_normalization": running_normalization,
    "lstm": lstm,
    "lstm_last_step": lstm_last_step,
    "masked_global_pooling": masked_global_pooling,
    "multi_head_attention": multi_head_attention,
    "multi_index_slicing": multi_index_slicing,
    "point_net": point_net,
    "recurrent_cell": recurrent_cell,
    "repeat_to_match": repeat_to_match,
    "self_attention_conv": self_attention_conv,
    "self_attention_seq": self_attention_seq,
    "set_attention": set_attention,
    "slice": slice_block,
    "strided": strided,
    "strided_dense": strided_dense,
    "torch_model": torch_model,
    "vgg": vgg,
    "vgg_dense": vgg_dense,
    "vgg_gap": vgg_gap,
}


def random_input(block: PerceptionBlock, batch_shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Features, masks that leave something valid, symmetric adjacency matrices."""
    tensors = {}
    for key, shape in zip(block.in_keys, block.in_shapes, strict=True):
        if key == "mask":
            mask = (torch.rand((*batch_shape, *shape)) < 0.6).float()
            n_actions = getattr(block, "num_of_actor_actions", None)
            if isinstance(n_actions, list):
                mask[..., [0, *itertools.accumulate(n_actions[:-1])]] = 1.0
            else:
                mask[..., :: n_actions or shape[-1]] = 1.0
            tensors[key] = mask
        elif key == "adjacency":
            upper = torch.triu((torch.rand((*batch_shape, *shape)) < 0.7).float(), diagonal=1)
            tensors[key] = upper + upper.transpose(-2, -1)
        else:
            tensors[key] = torch.randn((*batch_shape, *shape))
    return tensors
