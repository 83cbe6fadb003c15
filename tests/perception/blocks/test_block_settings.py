"""Settings that do not fit are errors that name block, argument, what was expected and what was found."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces
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
        (lambda: blocks.VGGConvolutionDenseBlock("x", "out", (64, 64), [8], [8], nn.ReLU), r"'x': \(64, 64\)"),
        (lambda: graph([(3, 2), (3, 3)], bias=[True]), "`bias` must be one value or one for each of the 2 layers"),
        (lambda: blocks.ConcatenationBlock(["a", "b"], "out", [(2,), (3,)], 0), r"`concat_dim` must lie in \[1, 1\]"),
        (lambda: blocks.SliceBlock("x", "out", (2, 3), 3, 0), "`slice_dim`"),
        (lambda: blocks.MaskedGlobalPoolingBlock("x", "out", (2, 3), "median", 1).out_shapes(), "function 'median'"),
        (lambda: blocks.FunctionalBlock("x", ["a", "b"], (2,), torch.tanh).out_shapes(), "FunctionalBlock"),
    ],
)
def test_settings_that_do_not_fit_are_named(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize(
    "block",
    [
        strided(shape=(1, 4, 4)),
        blocks.VGGConvolutionBlock("x", "out", (3, 7, 64), [8, 8, 8], nn.ReLU),
        graph([(3, 2), (4, 4)]),
        attention(kdim=5),
        blocks.ConcatenationBlock(["a", "b"], "out", [(2, 3), (3, 3)], -1),
        blocks.SliceBlock("x", "out", (2, 3), 1, 2),
        blocks.MultiIndexSlicingBlock("x", "out", (2, 3), 1, [0, 5]),
        blocks.RepeatToMatchBlock(["x", "y"], "out", [(2, 3), (4, 3)], 1),
        blocks.CorrelationBlock(["x", "y"], "out", [(2, 3), (2, 4)], True),
        blocks.MaskedGlobalPoolingBlock(["x", "m"], "out", [(2, 3), (3,)], "max", 1),
        blocks.FlattenBlock("x", "out", (2, 3), 3),
    ],
)
def test_shapes_that_do_not_fit_are_errors_at_shape_inference_that_name_the_block(block):
    with pytest.raises(ConfigError, match=rf"{type(block).__name__} \(out\): .*(cannot process|batch dimension)"):
        block.out_shapes()


def test_sizes_may_be_the_numbers_and_arrays_that_spaces_of_gymnasium_state():
    category, machines = spaces.Discrete(3, start=2), spaces.MultiDiscrete([2, 3], start=[1, 1])
    encoded = blocks.CategoryEncodingBlock("x", "out", [()], category.n, start=category.start)
    assert encoded({"x": torch.tensor([2, 4])})["out"].tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    encoded = blocks.CategoryEncodingBlock("x", "out", [(2,)], machines.nvec, start=machines.start)
    assert encoded({"x": torch.tensor([[2, 3]])})["out"].tolist() == [[0.0, 1.0, 0.0, 0.0, 1.0]]
    shapes = [(5,), (5,)]
    masked = blocks.ActionMaskingBlock(["logits", "mask"], "out", shapes, len(machines.nvec), machines.nvec)
    mask = torch.tensor([[1.0, 0.0, 0.0, 0.0, 1.0]])
    assert (masked({"logits": torch.zeros(1, 5), "mask": mask})["out"] == 0.0).tolist() == mask.bool().tolist()
