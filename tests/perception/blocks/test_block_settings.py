"""Settings that do not fit are errors that name block, argument, what was expected and what was found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception import blocks

STRIDED = {
    "hidden_channels": [4, 4],
    "hidden_kernels": [3, 3],
    "non_lin": nn.ReLU,
    "convolution_dimension": 2,
    "hidden_strides": None,
    "hidden_dilations": None,
    "hidden_padding": None,
    "padding_mode": None,
}


def strided(shape: tuple[int, ...] = (1, 9, 9), **changed: object) -> object:
    return blocks.StridedConvolutionBlock("x", "out", shape, **{**STRIDED, **changed})


def attention(**changed: object) -> object:
    settings = {
        "num_heads": 2,
        "dropout": None,
        "add_input_to_output": False,
        "bias": True,
        "add_bias_kv": False,
        "add_zero_attn": False,
        "kdim": None,
        "vdim": None,
        "use_key_padding_mask": False,
    }
    in_keys = changed.pop("in_keys", ["q", "k", "v"])
    return blocks.MultiHeadAttentionBlock(in_keys, "out", [(3, 4)] * len(in_keys), **{**settings, **changed})


def graph(shapes: list[tuple[int, ...]], **changed: object) -> object:
    settings = {"hidden_features": [4, 4], "bias": True, "non_lins": nn.ReLU}
    return blocks.GraphConvBlock(
        ["x", "a"],
        "out",
        shapes,
        **{**settings, **changed},
        node_self_importance=1.0,
        trainable_node_self_importance=False,
        preprocess_adj=True,
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: strided(hidden_kernels=[3]), r"\(out\): `hidden_kernels` .* each of the 2 layers"),
        (lambda: strided(hidden_strides=[(1, 1, 1), 1]), "`hidden_strides`"),
        (lambda: strided(convolution_dimension=4), "`convolution_dimension` must be 1, 2 or 3, found 4"),
        (lambda: strided(padding_mode="mirror"), "`padding_mode` must be one of zeros"),
        (lambda: strided(shape=(1, 4, 4)), r"layer 1 .* spatial size \(2, 2\).*'x' has the shape \(1, 4, 4\)"),
        (lambda: blocks.VGGConvolutionBlock("x", "out", (3, 7, 64), [8, 8, 8], nn.ReLU), "at least 8 pixels"),
        (lambda: blocks.VGGConvolutionBlock("x", "out", (3, 8, 8), [], nn.ReLU), "`hidden_channels` is empty"),
        (lambda: blocks.VGGConvolutionDenseBlock("x", "out", (64, 64), [8], [8], nn.ReLU), "input 'x' must have"),
        (lambda: attention(num_heads=3), r"`num_heads` \(3\) must divide the number of features .4."),
        (lambda: attention(kdim=5), "`kdim` is 5, but the input has 4 features"),
        (lambda: attention(in_keys=["q", "k"]), "query, key, value"),
        (lambda: attention(use_key_padding_mask=True), "needs a fourth input key"),
        (lambda: graph([(3, 2), (4, 4)]), r"\(nodes, nodes\), found \(3, 2\) and \(4, 4\)"),
        (lambda: graph([(3, 2), (3, 3)], bias=[True]), "`bias` must be one value or one for each of the 2 layers"),
        (lambda: graph([(3, 2), (3, 3)], hidden_features=[]), "`hidden_features` is empty"),
        (lambda: blocks.ConcatenationBlock(["a", "b"], "out", [(2, 3), (3, 3)], -1), "`concat_dim`"),
        (lambda: blocks.ConcatenationBlock(["a", "b"], "out", [(2,), (3,)], 0), r"`concat_dim` must lie in \[1, 1\]"),
        (lambda: blocks.SliceBlock("x", "out", (2, 3), 3, 0), "`slice_dim`"),
        (lambda: blocks.SliceBlock("x", "out", (2, 3), 1, 2), r"`slice_idx` must lie in \[-2, 1\], found 2"),
        (lambda: blocks.MultiIndexSlicingBlock("x", "out", (2, 3), 1, [0, 5]), "`select_idxs`.*found 5"),
        (lambda: blocks.FlattenBlock("x", "out", (2, 3), 3), r"`num_flatten_dims` must lie in \[0, 2\]"),
        (lambda: blocks.RepeatToMatchBlock(["x", "y"], "out", [(2, 3), (4, 3)], 1), "`repeat_at_idx`"),
        (lambda: blocks.CorrelationBlock(["x", "y"], "out", [(2, 3), (2, 4)], True), "of equal sizes or 1"),
        (lambda: blocks.MaskedGlobalPoolingBlock("x", "out", (2, 3), "median", 1), "`pooling_func`.*'median'"),
        (lambda: blocks.MaskedGlobalPoolingBlock(["x", "m"], "out", [(2, 3), (3,)], "max", 1), "first dimensions"),
        (lambda: blocks.FunctionalBlock("x", "out", (2,), "torch.tanh"), "`func` must be callable"),
        (lambda: blocks.FunctionalBlock("x", ["a", "b"], (2,), torch.tanh).out_shapes(), r"found 1"),
    ],
)
def test_settings_that_do_not_fit_are_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
