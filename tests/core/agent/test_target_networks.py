"""Networks that follow others."""

import copy

import pytest
import torch
from torch import nn

from maze.core.agent.torch_model import TargetNetworks


class Masked(nn.Module):
    """A layer with all kinds of buffers: running statistics, a counter, an infinite mask."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))


def followed():
    source = Masked()
    target = copy.deepcopy(source)
    with torch.no_grad():
        target.layer.weight.copy_(torch.tensor([[1.0, 10.0]]))
        source.layer.weight.copy_(torch.tensor([[3.0, 0.0]]))
        source.norm(torch.tensor([[4.0], [6.0]]))  # moves the running statistics
    return target, source


@pytest.mark.parametrize(("tau", "expected"), [(0.0, [1.0, 10.0]), (0.1, [1.2, 9.0]), (1.0, [3.0, 0.0])])
def test_parameters_move_by_tau(tau, expected):
    target, source = followed()
    TargetNetworks([target], [source]).update(tau)
    assert target.layer.weight.flatten().tolist() == pytest.approx(expected)
    assert source.layer.weight.tolist() == [[3.0, 0.0]]


def test_buffers_are_those_of_the_network_that_is_followed_at_any_tau():
    target, source = followed()
    TargetNetworks([target], [source]).update(0.1)
    for (name, ours), theirs in zip(target.named_buffers(), source.buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert target.norm.num_batches_tracked == 1
    assert target.mask.tolist() == [0.0, -torch.inf]


def test_several_networks_follow_in_their_order():
    pairs = [followed() for _ in range(2)]
    TargetNetworks(*zip(*pairs, strict=True)).update(1.0)
    assert all(torch.equal(target.layer.weight, source.layer.weight) for target, source in pairs)
