from __future__ import annotations

import math
from importlib.resources import files

import pytest
import torch
from gymnasium import spaces
from omegaconf import OmegaConf
from torch import nn

from maze.core.errors import ConfigError
from maze.core.utils.factory import Factory
from maze.perception.blocks.inference import drawable
from maze.perception.models.auto_model_composer import AutoModelComposer
from maze.perception.models.built_in.flatten_concat import (
    FlattenConcatPolicyNet,
    FlattenConcatSharedEmbeddingPolicyNet,
    FlattenConcatStateActionValueNet,
    FlattenConcatStateValueNet,
)
from maze.perception.models.model_composer import BaseModelComposer

PROBABILISTIC = {"_target_": "maze.perception.models.policies.ProbabilisticPolicyComposer"}
SHAPES = {"vector": (3,), "image": (2, 4), "level": ()}


@pytest.mark.parametrize("batch_shape", [(), (5,), (4, 2), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_any_leading_batch_dimensions_pass_through(batch_shape, dtype):
    x = {key: torch.ones((*batch_shape, *shape), dtype=dtype) for key, shape in SHAPES.items()}
    policy = FlattenConcatPolicyNet(SHAPES, {"move": (4,), "use": (2, 3)}, [8, 8], "torch.nn.Tanh")
    logits = policy(x)
    assert {head: tuple(value.shape) for head, value in logits.items()} == {
        "move": (*batch_shape, 4),
        "use": (*batch_shape, 2, 3),
    }
    assert FlattenConcatStateValueNet(SHAPES, [8], nn.ReLU)(x)["value"].shape == (*batch_shape, 1)


def test_observations_are_concatenated_in_their_order():
    value = FlattenConcatStateValueNet(SHAPES, [], nn.Tanh)
    with torch.no_grad():
        value.value_head.weight.copy_(torch.arange(12.0).unsqueeze(0))
    x = {"level": torch.zeros(1), "image": torch.zeros(1, 2, 4), "vector": torch.zeros(1, 3)}
    x["image"][0, 1, 0] = 1.0  # behind the three of `vector` and the four of the image's first row
    assert value(x)["value"].item() == 7.0


def test_initial_weights_are_unit_vectors_and_the_policy_starts_close_to_uniform():
    policy = FlattenConcatPolicyNet({"observation": (6,)}, {"action": (3,)}, [16], nn.Tanh)
    assert torch.allclose(policy.hidden[0].weight.norm(dim=1), torch.ones(16))
    assert torch.allclose(policy.heads[0].weight.norm(dim=1), torch.full((3,), 0.01))
    value = FlattenConcatStateValueNet({"observation": (6,)}, [16], nn.Tanh)
    assert torch.allclose(value.value_head.weight.norm(), torch.tensor(1.0))


DENSE = {"hidden_units": [8, 5], "non_lin": "torch.nn.Tanh"}


@pytest.mark.parametrize(
    ("network", "outputs"),
    [
        (lambda: FlattenConcatPolicyNet(SHAPES, {"move": (4,), "use": (2, 3)}, **DENSE), {"move": 4, "use": 6}),
        (lambda: FlattenConcatPolicyNet({"level": ()}, {"level": (4,)}, [], nn.Tanh), {"level_output": 4}),
        (lambda: FlattenConcatStateValueNet(SHAPES, **DENSE), {"value": 1}),
        (lambda: FlattenConcatStateActionValueNet(SHAPES, {"q_value": (1,)}, **DENSE), {"q_value": 1}),
        (lambda: FlattenConcatSharedEmbeddingPolicyNet(SHAPES, {"move": (4,)}, **DENSE, head_units=[3]), {"move": 4}),
    ],
)
def test_networks_are_drawn_as_blocks_of_their_size_without_random_numbers(network, outputs):
    network = network()
    generator = torch.get_rng_state()
    block = drawable(network)
    assert torch.equal(torch.get_rng_state(), generator)
    assert {key: math.prod(shape) for key, shape in zip(block.out_keys, block.out_shapes(), strict=True)} == outputs
    assert block.get_num_of_parameters() == sum(parameter.numel() for parameter in network.parameters())


def test_a_subclass_that_computes_something_else_is_not_drawn():
    class Halved(FlattenConcatPolicyNet):
        def forward(self, x):
            return {head: logits / 2 for head, logits in super().forward(x).items()}

    assert drawable(Halved(SHAPES, {"move": (4,)}, **DENSE)) is None


def test_missing_activations_and_observations_are_named():
    with pytest.raises(ConfigError, match="non_lin"):
        FlattenConcatPolicyNet({"observation": (6,)}, {"action": (3,)}, [16])
    with pytest.raises(ConfigError, match="obs_shapes"):
        FlattenConcatStateValueNet({}, [16], nn.Tanh)


FLAT = spaces.Dict(
    {"vector": spaces.Box(-1.0, 1.0, (3,)), "bits": spaces.MultiBinary(2), "level": spaces.Box(0, 1, ())}
)
CHOICE = spaces.Dict({"choice": spaces.Discrete(4)})


def composed(observations, actions=CHOICE, model="flatten_concat", **policy):
    config = OmegaConf.load(files("maze.conf") / "model" / f"{model}.yaml")
    critic = OmegaConf.load(files("maze.conf") / "critic" / "flatten_concat_shared.yaml")
    if model == "flatten_concat":
        config.critic = critic
    config.policy.update(policy)
    if not isinstance(observations, dict):
        observations, actions = {0: observations}, {0: actions}
    return Factory(BaseModelComposer).instantiate(
        config,
        action_spaces_dict=actions,
        observation_spaces_dict=observations,
        agent_counts_dict=dict.fromkeys(actions, 1),
    )


def test_flat_vectors_keep_flatten_and_concatenate(tmp_path, capsys):
    model = composed(FLAT)
    assert isinstance(model.policy.networks[0], FlattenConcatPolicyNet)
    assert isinstance(next(iter(model.critic.networks.values())), FlattenConcatStateValueNet)
    model.save_models(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("observations", "actions", "reason"),
    [
        ({"cell": spaces.Discrete(16)}, CHOICE, "`cell` is not a flat vector but a Discrete"),
        (
            {**FLAT.spaces, "hand": spaces.MultiDiscrete([3, 2])},
            CHOICE,
            "`hand` is not a flat vector but a MultiDiscrete",
        ),
        (
            {**FLAT.spaces, "grid": spaces.Box(0, 1, (4, 2))},
            CHOICE,
            "`grid` is not a flat vector but a Box of the shape (4, 2)",
        ),
        ({**FLAT.spaces, "action_mask": spaces.Box(0, 1, (4,))}, CHOICE, "`action_mask` masks the action `choice`"),
    ],
)
def test_flatten_concat_hands_structured_spaces_over_to_the_auto_model(observations, actions, reason, tmp_path, capsys):
    space = spaces.Dict(observations)
    model = composed(space, actions)
    model.save_models(tmp_path)
    assert capsys.readouterr().out == f"model=flatten_concat hands over to model=auto: {reason}.\n"
    assert (tmp_path / "model.yaml").is_file()
    x = {key: torch.as_tensor(value)[None] for key, value in space.sample().items()}
    x |= {key: torch.ones(1, 4) for key in x if key == "action_mask"}
    assert model.policy.networks[0](x)["choice"].shape == (1, 4)
    assert next(iter(model.critic.networks.values()))(x)["value"].shape == (1, 1)


def test_categories_are_encoded_as_unit_vectors():
    network = composed(spaces.Dict({"cell": spaces.Discrete(16)})).policy.networks[0]
    (first,) = (layer for layer in network.modules() if isinstance(layer, nn.Linear) and layer.in_features == 16)
    assert first.out_features == 64


def test_several_substeps_share_one_entry_of_the_configuration(tmp_path, capsys):
    steps = {0: spaces.Dict({"vector": FLAT["vector"]}), "second": FLAT}
    actions = {0: CHOICE, "second": spaces.Dict({"move": spaces.Box(-1, 1, (2,))})}
    model = composed(steps, actions)
    assert list(model.policy.networks) == [0, "second"]
    model.save_models(tmp_path)
    assert list(model.critic.networks) == [0, "second"]
    reason = "there are 2 sub-steps, and one network is configured"
    kept = "critics value each sub-step on its own (model=auto keeps a shared critic)"
    assert capsys.readouterr().out == f"model=flatten_concat hands over to model=auto: {reason}; {kept}.\n"
    critic = OmegaConf.load(files("maze.conf") / "critic" / "flatten_concat_shared.yaml")
    auto = AutoModelComposer(actions, steps, dict.fromkeys(steps, 1), [], PROBABILISTIC, critic)
    assert list(auto.critic.networks) == [0]


def test_width_activation_and_shared_embeddings_are_taken_along():
    cell = spaces.Dict({"cell": spaces.Discrete(16)})
    flat_net = "maze.perception.models.built_in.flatten_concat.FlattenConcatPolicyNet"
    network = {"_target_": flat_net, "hidden_units": [96, 48], "non_lin": "torch.nn.ReLU"}
    layers = list(composed(cell, networks=[network]).policy.networks[0].modules())
    assert any(isinstance(layer, nn.Linear) and layer.out_features == 48 for layer in layers)
    assert any(isinstance(layer, nn.ReLU) for layer in layers)
    shared = composed(cell, model="flatten_concat_shared_embedding")
    assert "hidden" in shared.policy.networks[0].out_keys
    assert next(iter(shared.critic.networks.values())).in_keys == ["hidden"]


class OwnNet(FlattenConcatPolicyNet):
    pass


def test_networks_of_ones_own_are_never_replaced():
    own = {"_target_": f"{__name__}.OwnNet", "hidden_units": [8], "non_lin": "torch.nn.Tanh"}
    model = composed(spaces.Dict({"grid": spaces.Box(0, 1, (4, 2))}), networks=[own])
    assert isinstance(model.policy.networks[0], OwnNet)


def test_logits_of_an_ordered_head_are_a_quadratic_function_of_the_choice() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_units": [8], "non_lin": nn.Tanh}
    policy = FlattenConcatPolicyNet({"x": (2,)}, {"order": (5,), "mode": (3,)}, **sizes, ordered_heads=["order"])
    logits = policy({"x": torch.randn(7, 2)})["order"]
    assert logits.diff(n=2, dim=-1).abs().min() > 0
    torch.testing.assert_close(logits.diff(n=3, dim=-1), torch.zeros(7, 2), atol=1e-6, rtol=0.0)
    logits.square().mean().backward()  # type: ignore[no-untyped-call]
    assert [p.grad is not None for p in policy.heads[0].parameters()] == [True, True, False]  # powers stay
    with pytest.raises(ConfigError, match=r"expected some of the discrete heads \['order', 'mode'\], found \['size'\]"):
        FlattenConcatPolicyNet({"x": (2,)}, {"order": (5,), "mode": (3,)}, **sizes, ordered_heads=["size"])
