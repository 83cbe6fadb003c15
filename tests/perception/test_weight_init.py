"""Initial weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.weight_init import compute_sigmoid_bias, make_module_init_normc, spread_zero_biases


@pytest.mark.parametrize("layer", [nn.Linear(7, 5), nn.Conv1d(3, 4, 2), nn.Conv2d(3, 4, 2), nn.Conv3d(2, 3, 2)])
@pytest.mark.parametrize("std", [1.0, 0.01])
def test_weights_into_each_unit_have_the_given_length_and_biases_are_zero(layer, std):
    layer.apply(make_module_init_normc(std))
    lengths = layer.weight.flatten(1).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, std))
    assert not bool(layer.bias.any())


def test_other_modules_and_missing_biases_are_left_alone():
    net = nn.Sequential(nn.Linear(3, 4, bias=False), nn.LayerNorm(4), nn.LSTM(4, 2))
    before = net[2].weight_ih_l0.clone()
    net.apply(make_module_init_normc())
    assert bool((net[1].weight == 1).all())
    assert torch.equal(net[2].weight_ih_l0, before)


def test_only_biases_of_zero_are_spread_and_a_unit_then_bends_away_from_the_origin():
    fresh, chosen = nn.Linear(2, 64).apply(make_module_init_normc()), nn.Linear(2, 3)
    with torch.no_grad():
        chosen.bias.copy_(torch.tensor([0.0, 5.0, 0.0]))
    nn.Sequential(fresh, nn.LayerNorm(64), chosen).apply(spread_zero_biases)
    assert 0.3 < fresh.bias.std() < 0.5  # uniform within 1 / sqrt(2): 0.41
    assert fresh.bias.abs().max() <= 2**-0.5
    assert chosen.bias.tolist() == [0.0, 5.0, 0.0]


def test_parameters_keep_their_storage_in_initialization():
    layer = nn.Linear(3, 4)
    address = layer.weight.data_ptr()
    layer.apply(make_module_init_normc())
    assert layer.weight.data_ptr() == address
    assert layer.weight.requires_grad


@pytest.mark.parametrize("probability", [0.001, 0.25, 0.5, 0.9])
def test_sigmoid_of_the_bias_is_the_probability(probability):
    assert 1.0 / (1.0 + math.exp(-compute_sigmoid_bias(probability))) == pytest.approx(probability)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.5, 2.0])
def test_a_probability_without_finite_bias_is_an_error(probability):
    with pytest.raises(ConfigError, match=r"must lie in \(0, 1\)"):
        compute_sigmoid_bias(probability)
