"""Networks in NumPy: results of the caller are not overwritten, and changes of the network are detected."""

import numpy as np
import pytest
import torch
from torch import nn

from maze.perception.blocks import DenseBlock, InferenceBlock
from maze.perception.models.built_in.flatten_concat import (
    FlattenConcatPolicyNet,
    FlattenConcatSharedEmbeddingPolicyNet,
    FlattenConcatStateValueNet,
)
from maze.perception.program.network_program import in_numpy, population_in_numpy, read_program
from maze.train.trainers.es.distributed.es_dummy_distributed_rollouts import TorchPopulation


class Everything(nn.Module):
    """Results that are returned and activated, activated inputs, a layer that is used twice, and no bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.relu, self.tanh, self.last = nn.ReLU(), nn.Tanh(), nn.Sequential(nn.Linear(6, 4), nn.Identity(), nn.ELU())

    def forward(self, x):
        start = self.relu(x["x"])
        before = self.second(self.first(self.first(start)))
        after = self.tanh(before)
        both = torch.cat([before, after], -1)
        return {"start": start, "before": before, "after": after, "matrix": self.last(both).unflatten(-1, (2, 2))}

    def describe_forward(self, reader, inputs):
        start = reader.layer(self.relu, inputs["x"])
        before = reader.layer(self.second, reader.layer(self.first, reader.layer(self.first, start)))
        after = reader.layer(self.tanh, before)
        both = reader.concatenate([before, after], -1)
        matrix = reader.unflatten(reader.layer(self.last, both), (2, 2))
        return {"start": start, "before": before, "after": after, "matrix": matrix}


@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)], ids=["vectors", "several vectors in each row"])
def test_results_in_use_are_not_overwritten(shape):
    torch.manual_seed(0)
    network = Everything()
    array = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    kept = array.copy()
    expected = network({"x": torch.from_numpy(kept.copy())})
    stacked = {id(parameter): np.stack([parameter.detach().numpy()] * 5) for parameter in network.parameters()}
    del stacked[id(network.second.weight)]  # one that is the same for all
    for found in (in_numpy(network)({"x": array}), population_in_numpy(network, stacked)({"x": array}, np.arange(5))):
        assert list(found) == list(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(array, kept)


def policy_net():
    torch.manual_seed(0)
    return FlattenConcatPolicyNet({"x": (3,)}, {"action": (2,)}, [4], nn.Tanh)


def add_hook(network):
    network.hidden[1].register_forward_hook(lambda *_: None)


def exchange_activation(network):
    network.hidden[1] = nn.ReLU()


def add_layer(network):
    network.hidden.append(nn.Tanh())


def replace_forward(network):
    network.heads[0].forward = lambda x: 2.0 * x


def replace_weights(network):
    network.hidden[0].weight = nn.Parameter(torch.ones(4, 3))


def move_weights(network):
    network.hidden[0].weight.data = torch.ones(4, 3)


CHANGES = [add_hook, exchange_activation, add_layer, replace_forward, replace_weights, move_weights]


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_a_network_are_detected(change):
    network = policy_net()
    compiled = in_numpy(network)
    assert compiled.is_current()
    with torch.no_grad():
        network.hidden[0].weight.add_(1.0)  # an optimiser step is not a change: the memory is the same
    assert compiled.is_current()
    change(network)
    assert not compiled.is_current()


def test_global_forward_hooks_are_detected():
    compiled = in_numpy(policy_net())
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not compiled.is_current()
        assert read_program(policy_net()) is None
    finally:
        handle.remove()
    assert compiled.is_current()


class OtherLatent(FlattenConcatPolicyNet):
    def latent(self, x):
        return 2.0 * super().latent(x)


class OtherForward(DenseBlock):
    def normalized_forward(self, block_input):
        return {key: 2.0 * value for key, value in super().normalized_forward(block_input).items()}


def weight_norm():
    network = policy_net()
    nn.utils.parametrizations.weight_norm(network.hidden[0])
    return network


UNREADABLE = {
    "latent replaced": lambda: OtherLatent({"x": (3,)}, {"action": (2,)}, [4], nn.Tanh),
    "forward of a part replaced": lambda: InferenceBlock(
        "x", "out", (3,), {"out": OtherForward("x", "out", (3,), [4], nn.Tanh)}
    ),
    "unknown layer": lambda: FlattenConcatPolicyNet({"x": (3,)}, {"action": (2,)}, [4], nn.GELU),
    "parametrised layer": weight_norm,
    "undescribed": lambda: nn.Linear(3, 2),
}


@pytest.mark.parametrize("make_network", UNREADABLE.values(), ids=UNREADABLE)
def test_networks_that_cannot_be_described_have_no_numpy_form(make_network):
    assert read_program(make_network()) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_parameters_that_numpy_cannot_share_run_in_torch(dtype):
    network = policy_net().to(dtype)
    assert read_program(network) is not None
    assert in_numpy(network) is None
    assert population_in_numpy(network, {}) is None


@pytest.mark.parametrize(
    "network",
    [
        FlattenConcatStateValueNet({"a": (2, 2), "b": ()}, [4], nn.SELU),
        FlattenConcatSharedEmbeddingPolicyNet({"a": (2, 2), "b": ()}, {"x": (2,), "y": (3, 2)}, [4], [5], nn.Sigmoid),
    ],
    ids=["values", "shared embedding"],
)
def test_built_in_networks_are_described(network):
    inputs = {"a": torch.randn(3, 2, 2), "b": torch.randn(3)}
    found = in_numpy(network)({key: tensor.numpy() for key, tensor in inputs.items()})
    for key, value in network(inputs).items():
        np.testing.assert_allclose(found[key], value.detach().numpy(), rtol=1e-5, atol=1e-6)


class Shared(nn.Module):
    """A network with a module under two names, and a weight that another layer shares."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": self.last(torch.sin(self.second(torch.sin(self.first(x["x"])))))}


def test_a_population_in_torch_replaces_shared_parameters_and_leaves_the_network_unchanged():
    network, rng = Shared(), np.random.default_rng(0)
    parameters = list(network.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    stacked = {id(p): rng.standard_normal((3, *p.shape), dtype=np.float32) for p in parameters}
    x = rng.standard_normal((3, 4), dtype=np.float32)
    outputs = TorchPopulation(network, stacked)({"x": x}, slice(None))["y"]
    assert all(own is other for own, other in zip(network.parameters(), parameters, strict=True))
    assert all(torch.equal(own, other) for own, other in zip(parameters, before, strict=True))
    for row in range(3):
        with torch.no_grad():
            for parameter in parameters:
                parameter.copy_(torch.from_numpy(stacked[id(parameter)][row]))
        torch.testing.assert_close(network({"x": torch.from_numpy(x[row])})["y"], outputs[row])
