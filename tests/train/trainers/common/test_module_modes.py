"""Which networks compute something else in training than in evaluation."""

import pytest
from torch import nn
from torch.nn import functional

from maze.core.agent.torch_model import depends_on_mode
from maze.perception.blocks.feed_forward.dense import DenseBlock


class AsksForMode(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x):
        return functional.dropout(self.layer(x), 0.5, self.training)


class Inherits(AsksForMode):
    pass


@pytest.mark.parametrize(
    "network", [nn.Sequential(nn.Linear(2, 2), nn.ReLU()), DenseBlock("x", "y", (4,), [8], nn.Tanh)]
)
def test_most_networks_do_not_depend_on_the_mode(network):
    assert not depends_on_mode([network])


@pytest.mark.parametrize(
    "network",
    [
        nn.Sequential(nn.Linear(2, 2), nn.Dropout()),
        nn.BatchNorm1d(2),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        AsksForMode(),
        nn.Sequential(Inherits()),
    ],
)
def test_networks_that_depend_on_the_mode_are_recognised(network):
    assert depends_on_mode([nn.Linear(2, 2), network])
