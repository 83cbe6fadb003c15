"""Graphs of blocks."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict

import pytest
import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks import (
    ConcatenationBlock,
    DenseBlock,
    FunctionalBlock,
    InferenceBlock,
    LinearOutputBlock,
    LSTMLastStepBlock,
    PerceptionBlock,
    VGGConvolutionDenseBlock,
)
from maze.perception.blocks.base import TensorDict
from maze.perception.weight_init import make_module_init_normc


def identity(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Counting(PerceptionBlock):
    """Counts its evaluations."""

    def __init__(self, in_key: str, out_key: str) -> None:
        super().__init__(in_key, out_key, (2,))
        self.n_calls = 0

    def forward(self, block_input: TensorDict) -> TensorDict:
        assert list(block_input) == self.in_keys
        self.n_calls += 1
        return {self.out_keys[0]: block_input[self.in_keys[0]] + 1.0}


def link(in_key: str, out_key: str) -> FunctionalBlock:
    return FunctionalBlock(in_key, out_key, (2,), identity)


def test_each_needed_block_is_evaluated_once_and_no_other():
    net = {
        "right": Counting("shared", "right"),
        "left": Counting("shared", "left"),
        "unneeded": Counting("shared", "unneeded"),
        "shared": Counting("observation", "shared"),
    }
    block = InferenceBlock("observation", ["left", "right"], (2,), net)
    block.out_shapes()
    before = {name: part.n_calls for name, part in net.items()}
    result = block({"observation": torch.zeros(3, 2), "other": torch.zeros(1)})
    calls = {name: part.n_calls - before[name] for name, part in net.items()}
    assert calls == {"shared": 1, "left": 1, "right": 1, "unneeded": 0}
    assert list(result) == ["left", "right"]
    assert result["right"].tolist() == [[2.0, 2.0]] * 3
    assert list(block.perception_blocks) == ["shared", "left", "right"]


def test_parameters_of_blocks_that_are_not_needed_do_not_belong_to_the_model():
    latent = DenseBlock("x", "latent", (2,), [3], nn.ReLU)
    net = {"latent": latent, "value": LinearOutputBlock("latent", "value", (3,), 1)}
    assert InferenceBlock("x", "latent", (2,), net).get_num_of_parameters() == latent.get_num_of_parameters()


def test_inputs_cut_a_larger_graph_in_the_middle():
    latent = DenseBlock("x", "latent", (2,), [3], nn.ReLU)
    value = LinearOutputBlock("latent", "value", (3,), 1)
    head = InferenceBlock("latent", "value", (3,), {"latent": latent, "value": value})
    assert list(head.perception_blocks) == ["value"]
    embedding = torch.randn(4, 3)
    assert torch.equal(head({"latent": embedding})["value"], value({"latent": embedding})["value"])


class Doubling(PerceptionBlock):
    """Return its input, and twice its input."""

    def forward(self, block_input: TensorDict) -> TensorDict:
        return {key: factor * block_input["x"] for factor, key in enumerate(self.out_keys, start=1)}


def test_a_given_tensor_is_not_replaced_by_a_block_that_also_produces_it():
    net = {
        "both": Doubling("x", ["once", "twice"], (1,)),
        "joined": ConcatenationBlock(["once", "twice"], "joined", [(1,), (1,)], -1),
    }
    block = InferenceBlock(["x", "twice"], ["joined", "twice"], [(1,), (1,)], net)
    outputs = block({"x": torch.ones(1, 1), "twice": torch.full((1, 1), 7.0)})
    assert (outputs["joined"].tolist(), outputs["twice"].tolist()) == ([[1.0, 7.0]], [[7.0]])


def test_an_input_can_also_be_an_output():
    block = InferenceBlock(["x", "y"], ["x", "z"], [(2,), (2,)], {"z": link("y", "z")})
    assert block.out_shapes() == [(2,), (2,)]
    assert block({"x": torch.ones(2), "y": torch.zeros(2)})["x"].tolist() == [1.0, 1.0]


def test_an_unused_input_may_be_absent():
    block = InferenceBlock(["x", "y"], "z", [(2,), (2,)], {"z": link("y", "z")})
    assert list(block({"y": torch.zeros(2)})) == ["z"]


@pytest.mark.parametrize(
    ("net", "message"),
    [
        ({"a": link("x", "a")}, "`out_keys` needs 'out', which is neither an input nor produced"),
        ({"out": link("laten", "out"), "latent": link("x", "latent")}, "block 'out' needs 'laten'.*mean `latent`"),
        ({"out": link("a", "out"), "a": link("b", "a"), "b": link("a", "b")}, "cycle: a -> b -> a"),
        ({"out": link("out", "out")}, "cycle: out -> out"),
        ({"a": link("x", "out"), "b": link("x", "out")}, "blocks 'a' and 'b' both produce 'out'"),
        (
            {"a": DenseBlock("x", "a", (2,), [3], nn.ReLU), "out": LinearOutputBlock("a", "out", (4,), 1)},
            r"block 'out' was declared with shape \(4,\) for its input 'a', which has shape \(3,\)",
        ),
        (
            {"out": LinearOutputBlock("x", "out", (4,), 1)},
            r"block 'out' was declared with shape \(4,\) for its input 'x', which has shape \(2,\)",
        ),
    ],
)
def test_graphs_that_cannot_be_evaluated_are_errors_at_construction(net, message):
    with pytest.raises(ConfigError, match=rf"InferenceBlock \(out\): .*{message}"):
        InferenceBlock("x", "out", (2,), net)


def test_a_key_error_inside_a_block_passes_unchanged():
    class Broken(Counting):
        def forward(self, block_input: TensorDict) -> TensorDict:
            if self.n_calls > 0:
                raise KeyError("table")
            return super().forward(block_input)

    block = InferenceBlock("x", "out", (2,), {"out": Broken("x", "out")})
    with pytest.raises(KeyError, match="table"):
        block({"x": torch.zeros(2)})


@pytest.mark.parametrize("name", ["type", "values", "training", "a.b", "", "forward"])
def test_any_key_can_name_a_block_and_the_state_survives_a_round_trip(name):
    def build() -> InferenceBlock:
        latent = DenseBlock("x", "latent", (2,), [3], nn.ReLU)
        return InferenceBlock("x", name, (2,), {"latent": latent, name: LinearOutputBlock("latent", name, (3,), 1)})

    block, other = build(), build()
    other.load_state_dict(block.state_dict())
    observation = {"x": torch.randn(5, 2)}
    assert torch.equal(block(observation)[name], other(observation)[name])
    assert len(block.state_dict()) == 4


def test_a_copy_evaluates_its_own_blocks():
    block = InferenceBlock("x", "out", (2,), {"out": LinearOutputBlock("x", "out", (2,), 1)})
    twin = copy.deepcopy(block)
    nn.init.zeros_(twin.perception_blocks["out"].net.weight)
    nn.init.ones_(twin.perception_blocks["out"].net.bias)
    assert twin({"x": torch.randn(3, 2)})["out"].tolist() == [[1.0]] * 3
    assert set(dict(twin.named_parameters())) == set(dict(block.named_parameters()))


def test_inference_blocks_nest():
    inner = InferenceBlock("x", "latent", (2,), {"latent": DenseBlock("x", "latent", (2,), [3], nn.ReLU)})
    outer = InferenceBlock("x", "out", (2,), {"inner": inner, "out": LinearOutputBlock("latent", "out", (3,), 1)})
    assert outer({"x": torch.zeros(4, 5, 2)})["out"].shape == (4, 5, 1)
    assert outer.get_num_of_parameters() == 2 * 3 + 3 + 3 + 1


class DocumentedPolicy(nn.Module):
    """A custom model as the documentation builds it: two observations, a recurrent latent space, two action heads."""

    def __init__(self, obs_shapes, action_logits_shapes, non_lin, hidden_units):
        nn.Module.__init__(self)
        self.perception_dict = OrderedDict()
        self.perception_dict["latent_inventory"] = DenseBlock(
            in_keys="observation_inventory",
            out_keys="latent_inventory",
            in_shapes=obs_shapes["observation_inventory"],
            hidden_units=[128],
            non_lin=non_lin,
        )
        self.perception_dict["latent_screen"] = VGGConvolutionDenseBlock(
            in_keys="observation_screen",
            out_keys="latent_screen",
            in_shapes=obs_shapes["observation_screen"],
            non_lin=non_lin,
            hidden_channels=[8, 16, 32],
            hidden_units=[32],
        )
        self.perception_dict["latent_concat"] = ConcatenationBlock(
            in_keys=["latent_inventory", "latent_screen"],
            out_keys="latent_concat",
            in_shapes=self.perception_dict["latent_inventory"].out_shapes()
            + self.perception_dict["latent_screen"].out_shapes(),
            concat_dim=-1,
        )
        self.perception_dict["latent_dense"] = DenseBlock(
            in_keys="latent_concat",
            out_keys="latent_dense",
            hidden_units=hidden_units,
            non_lin=non_lin,
            in_shapes=self.perception_dict["latent_concat"].out_shapes(),
        )
        self.perception_dict["latent"] = LSTMLastStepBlock(
            in_keys="latent_dense",
            out_keys="latent",
            in_shapes=self.perception_dict["latent_dense"].out_shapes(),
            hidden_size=32,
            num_layers=1,
            bidirectional=False,
            non_lin=non_lin,
        )
        for action_key, action_shape in action_logits_shapes.items():
            self.perception_dict[action_key] = LinearOutputBlock(
                in_keys="latent",
                out_keys=action_key,
                in_shapes=self.perception_dict["latent"].out_shapes(),
                output_units=int(action_shape[0]),
            )
        in_keys = list(obs_shapes.keys())
        self.perception_net = InferenceBlock(
            in_keys=in_keys,
            out_keys=list(action_logits_shapes.keys()),
            perception_blocks=self.perception_dict,
            in_shapes=[obs_shapes[key] for key in in_keys],
        )
        self.perception_net.apply(make_module_init_normc(1.0))
        for action_key in action_logits_shapes:
            self.perception_dict[action_key].apply(make_module_init_normc(0.01))

    def forward(self, in_tensor_dict):
        return self.perception_net(in_tensor_dict)


def test_the_documented_recurrent_model_runs_on_any_batch():
    shapes = {"observation_screen": (4, 3, 64, 64), "observation_inventory": (4, 16)}
    heads = {"action_move": (4,), "action_use": (16,)}
    model = DocumentedPolicy(shapes, heads, "torch.nn.ReLU", [128])
    for batch_shape in [(), (2,), (2, 1)]:
        outputs = model({key: torch.rand(*batch_shape, *shape) for key, shape in shapes.items()})
        assert {key: tuple(tensor.shape) for key, tensor in outputs.items()} == {
            key: (*batch_shape, *shape) for key, shape in heads.items()
        }
        assert all(bool((tensor.abs() < 1.0).all()) for tensor in outputs.values())
    # Each parameter has one name only: the plain dictionary of blocks does not register them a second time.
    assert all(re.match(r"perception_net\.blocks\.\w+\.", name) for name in model.state_dict())
