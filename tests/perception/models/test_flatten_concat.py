from __future__ import annotations

import pytest
import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateValueNet

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


def test_missing_activations_and_observations_are_named():
    with pytest.raises(ConfigError, match="non_lin"):
        FlattenConcatPolicyNet({"observation": (6,)}, {"action": (3,)}, [16])
    with pytest.raises(ConfigError, match="obs_shapes"):
        FlattenConcatStateValueNet({}, [16], nn.Tanh)
