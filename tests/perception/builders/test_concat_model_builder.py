"""From observation spaces to perception networks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks import DenseBlock, ShapeNormalizationBlock
from maze.perception.builders import BaseModelBuilder, ConcatModelBuilder

DENSE = {"block_type": "maze.perception.blocks.DenseBlock", "block_params": {"hidden_units": [5], "non_lin": nn.ReLU}}
HIDDEN = {
    "block_type": "maze.perception.blocks.DenseBlock",
    "block_params": {"hidden_units": [7], "non_lin": "torch.nn.ReLU"},
}
CONV = {
    "block_type": "maze.perception.blocks.VGGConvolutionBlock",
    "block_params": {"hidden_channels": [3], "non_lin": "torch.nn.ReLU"},
}
LSTM = {
    "block_type": "maze.perception.blocks.LSTMLastStepBlock",
    "block_params": {"hidden_size": 6, "num_layers": 1, "bidirectional": False, "non_lin": "torch.nn.SELU"},
}


class ScaleBlock(ShapeNormalizationBlock):
    """A block of a user's project."""

    def __init__(self, in_keys, out_keys, in_shapes, factor=2.0):
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=2, out_num_dims=2)
        self.factor = factor

    def normalized_forward(self, block_input):
        return {self.out_keys[0]: self.factor * block_input[self.in_keys[0]]}


def box(*shape):
    return spaces.Box(-1, 1, shape, np.float32)


def build(observations, mapping=None, **config):
    modality_config = {"feature": DENSE, "hidden": {}, "recurrence": {}, **config}
    builder = ConcatModelBuilder(modality_config, mapping or dict.fromkeys(observations, "feature"), None)
    return builder.from_observation_space(spaces.Dict(observations))


def test_the_stages_follow_one_another_and_their_tensors_have_the_documented_names():
    net = build(
        {"inventory": box(16), "screen": box(3, 8, 8)},
        {"inventory": "feature", "screen": "image"},
        image=CONV,
        hidden=HIDDEN,
    )
    shapes = {key: tuple(shape) for key, shape in net.tensor_shapes().items()}
    assert shapes == {
        "inventory": (16,),
        "screen": (3, 8, 8),
        "inventory_DenseBlock": (5,),
        "screen_VGGConvolutionBlock": (3, 4, 4),
        "screen_VGGConvolutionBlock_flat": (48,),
        "concat": (53,),
        "hidden": (7,),
    }
    assert net.out_keys == ["hidden"]


def test_a_single_observation_passes_the_concatenation_unchanged():
    net = build({"observation": box(4)})
    assert net.out_keys == ["concat"]
    x = {"observation": torch.randn(3, 4)}
    assert torch.equal(net(x)["concat"], net.perception_blocks["observation_DenseBlock"](x)["observation_DenseBlock"])


def test_a_recurrent_network_keeps_time_until_its_last_block():
    net = build(
        {"inventory": box(5, 16), "screen": box(5, 3, 8, 8)},
        {"inventory": "feature", "screen": "image"},
        image=CONV,
        hidden=HIDDEN,
        recurrence=LSTM,
    )
    shapes = net.tensor_shapes()
    assert tuple(shapes["concat"]) == (5, 53)
    assert tuple(shapes["hidden"]) == (5, 7)
    assert tuple(shapes["recurrence"]) == (6,)
    x = {"inventory": torch.randn(2, 5, 16), "screen": torch.randn(2, 5, 3, 8, 8)}
    earlier = {key: torch.cat([value[:, :1] + 1.0, value[:, 1:]], dim=1) for key, value in x.items()}
    assert not torch.equal(net(x)["recurrence"], net(earlier)["recurrence"])  # the first step matters


@given(
    shapes=st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=3),
    batch_shape=st.lists(st.integers(1, 3), max_size=3),
)
@settings(max_examples=25, deadline=None)
def test_observations_of_any_shape_become_one_vector(shapes, batch_shape):
    observations = {f"obs_{index}": box(*shape) for index, shape in enumerate(shapes)}
    net = build(observations, hidden=HIDDEN)
    x = {key: torch.randn((*batch_shape, *space.shape)) for key, space in observations.items()}
    assert net(x)["hidden"].shape == (*batch_shape, 7)


def test_each_network_has_weights_of_its_own():
    builder = ConcatModelBuilder({"feature": DENSE}, {"observation": "feature"}, None)
    space = spaces.Dict({"observation": box(4)})
    first, second = builder.from_observation_space(space), builder.from_observation_space(space)
    assert not {id(p) for p in first.parameters()} & {id(p) for p in second.parameters()}


@pytest.mark.parametrize("block", [f"{__name__}.ScaleBlock", ScaleBlock])
def test_blocks_of_a_users_project_are_named_by_path_or_class(block):
    net = build({"observation": box(4)}, feature={"block_type": block, "block_params": {"factor": 3.0}})
    assert torch.allclose(net({"observation": torch.ones(1, 4)})["concat"], torch.full((1, 4), 3.0))
    assert build({"observation": box(4)}, feature=block)  # without parameters the type is enough


def test_recurrent_spaces_have_the_time_steps_first():
    space = spaces.Dict(
        {
            "box": spaces.Box(np.array([0.0, -1.0], np.float32), np.array([1.0, 2.0], np.float32)),
            "pixels": spaces.Box(0, 255, (3, 4, 4), np.uint8),
            "choice": spaces.Discrete(3),
            "bits": spaces.MultiBinary(2),
            "choices": spaces.MultiDiscrete([2, 5]),
        }
    )
    recurrent = BaseModelBuilder.to_recurrent_gym_space(space, rnn_steps=6)
    for key, subspace in space.spaces.items():
        stacked = np.stack([subspace.sample() for _ in range(6)])
        assert recurrent[key].shape == (6, *subspace.shape)
        assert recurrent[key].contains(stacked.astype(recurrent[key].dtype)), key
    assert recurrent["box"].low[3].tolist() == [0.0, -1.0]
    assert recurrent["pixels"].dtype == np.uint8
    assert BaseModelBuilder.to_recurrent_gym_space(space, rnn_steps=0) is space


@pytest.mark.parametrize(
    ("given_keys", "expected"),
    [
        (None, {"select": [], "cut": []}),
        (["concat"], {"select": ["concat"], "cut": ["concat"]}),
        ({"cut": ["hidden"]}, {"select": [], "cut": ["hidden"]}),
    ],
)
def test_shared_embedding_keys_are_settled_for_each_substep(given_keys, expected):
    builder = ConcatModelBuilder({"feature": DENSE}, {"observation": "feature"}, given_keys)
    builder.init_shared_embedding_keys(["select", "cut"])
    assert builder.shared_embedding_keys == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mapping": {"a": "featur"}}, r"observation_modality_mapping.a: modality 'featur' is unknown.*`feature`"),
        ({"mapping": {"a": "hidden"}}, "modality 'hidden' is unknown. Known: 'feature'"),
        ({"mapping": {"b": "feature"}}, r"observation `a` has no modality"),
        ({"feature": {"block_typ": "x"}}, r"modality_config.feature: expected `block_type`.*'block_typ'"),
        ({"feature": {"block_type": "maze.perception.blocks.DenceBlock"}}, r"config.feature: .*DenceBlock.*DenseBlock"),
        (
            {"feature": {"block_type": "torch.nn.Linear"}},
            r"modality_config.feature: .*not a subclass of PerceptionBlock",
        ),
        (
            {"feature": {**DENSE, "block_params": {"hiden_units": [3]}}},
            r"modality_config.feature: missing.*`non_lin`.*did you mean `hidden_units`",
        ),
        ({"feature": CONV}, r"modality_config.feature: VGGConv.*at least \[3\] dimensions.*'a': \(4,\)"),
        ({"recurrence": LSTM}, r"modality_config.recurrence: .*time steps.*'a': \(4,\).*ObservationStackWrapper"),
    ],
)
def test_mistakes_are_named_by_their_key(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build({"a": box(4)}, **arguments)


def test_different_numbers_of_time_steps_are_named():
    with pytest.raises(ConfigError, match=r"recurrence: .*same number of time steps.*'a': \(4.*'b': \(5"):
        build({"a": box(4, 3), "b": box(5, 3)}, recurrence=LSTM)


def test_shared_keys_of_unknown_substeps_are_named():
    builder = ConcatModelBuilder({"feature": DENSE}, {"observation": "feature"}, {"cut": ["a"]})
    with pytest.raises(ConfigError, match=r"shared_embedding_keys: sub-step 'cut' is unknown. Known: 0"):
        builder.init_shared_embedding_keys([0])


def test_the_dense_block_follows_its_configuration():
    block = build({"observation": box(4)}).perception_blocks["observation_DenseBlock"]
    assert isinstance(block, DenseBlock)
    assert block.hidden_units == [5]


def test_a_pre_processed_observation_has_the_modality_of_what_it_was_made_of():
    net = build({"screen-rgb2gray-resize_img": box(1, 8, 8)}, {"screen": "image"}, image=CONV)
    assert net.in_keys == ["screen-rgb2gray-resize_img"]
    both = build(
        {"screen-rgb2gray": box(1, 8, 8), "screen": box(3, 8, 8)},
        {"screen": "image", "screen-rgb2gray": "feature"},
        image=CONV,
        feature={
            "block_type": "maze.perception.blocks.FlattenDenseBlock",
            "block_params": {"num_flatten_dims": 3, "hidden_units": [5], "non_lin": nn.ReLU},
        },
    )
    assert {"screen_VGGConvolutionBlock", "screen-rgb2gray_FlattenDenseBlock"} <= set(both.tensor_shapes())
