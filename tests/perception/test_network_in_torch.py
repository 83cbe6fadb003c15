"""Networks that are evaluated by their programs in torch equal their modules, with gradients."""

import contextlib
import copy
import pickle
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.perception.blocks import ConcatenationBlock, DenseBlock, InferenceBlock, LinearOutputBlock
from maze.perception.fast_layers import Tanh, fast_products, onednn_is_faster
from maze.perception.models.built_in.flatten_concat import (
    FlattenConcatPolicyNet,
    FlattenConcatSharedEmbeddingPolicyNet,
    FlattenConcatStateActionValueNet,
)
from maze.perception.program import network_in_torch
from maze.train.trainers.common.learning import constant


@contextlib.contextmanager
def by_modules():
    """Evaluate networks by their modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_in_torch._ProgramInTorch, "outputs", lambda *_: None)
        yield


def blocks_of(n_features: int, hidden_units: list[int], non_lin: type[nn.Module]) -> InferenceBlock:
    """Two observations, dense layers, and two outputs of them, one of which is the last hidden layer."""
    concat = ConcatenationBlock(["a", "b"], "both", [(n_features,), (2,)], -1)
    dense = DenseBlock("both", "latent", concat.out_shapes(), hidden_units, non_lin)
    output = LinearOutputBlock("latent", "out", dense.out_shapes(), 3)
    blocks = {"concat": concat, "dense": dense, "output": output}
    return InferenceBlock(["a", "b"], ["out", "latent"], [(n_features,), (2,)], blocks)


def results(network: nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Outputs, and gradients of inputs and parameters."""
    own = {key: tensor.clone().requires_grad_() for key, tensor in inputs.items()}
    outputs = list(network(own).values())
    total = sum(output.square().sum() for output in outputs)
    learned = [*own.values(), *(parameter for parameter in network.parameters() if parameter.requires_grad)]
    return [*outputs, *torch.autograd.grad(total, learned)]


@settings(max_examples=40, deadline=None)
@given(
    n_features=st.integers(1, 30),
    hidden_units=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    non_lin=st.sampled_from([nn.ReLU, nn.Tanh, Tanh, nn.ELU]),
    batch=st.sampled_from([(1,), (7,), (3, 4), (400,), (2, 1, 3)]),
    seed=st.integers(0, 99),
)
def test_programs_have_the_outputs_and_gradients_of_the_modules(n_features, hidden_units, non_lin, batch, seed):
    torch.manual_seed(seed)
    network = blocks_of(n_features, hidden_units, non_lin)
    inputs = {"a": torch.randn(*batch, n_features), "b": torch.randn(*batch, 2)}
    found = results(network, inputs)
    with by_modules():
        expected = results(network, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(list(network(inputs).values()), found[:2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("non_lin", [nn.ReLU, nn.Tanh, Tanh])
def test_large_layers_multiplied_by_onednn_have_the_gradients_of_the_modules(non_lin):
    if not onednn_is_faster():
        pytest.skip("MKL computes all products on this processor")
    torch.manual_seed(0)
    network = FlattenConcatPolicyNet({"x": (5,), "y": ()}, {"a": (3,), "b": (2, 2)}, [256, 64], non_lin)
    inputs = {"x": torch.randn(300, 5), "y": torch.randn(300)}
    with fast_products(network.parameters(), 300):
        found = results(network, inputs)
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    with by_modules():
        expected = results(network, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_observations_of_other_types_and_shared_embeddings_are_evaluated_alike():
    torch.manual_seed(0)
    network = FlattenConcatSharedEmbeddingPolicyNet({"x": (5,)}, {"a": (3,)}, [16], [8], nn.Tanh)
    numbers = torch.randint(0, 9, (6, 5))
    torch.testing.assert_close(network({"x": numbers}), network({"x": numbers.float()}))
    found = results(network, {"x": torch.randn(6, 5)})
    assert [tuple(each.shape) for each in found[:2]] == [(6, 3), (6, 16)]


def test_constant_layers_have_no_gradients_but_pass_them_on():
    torch.manual_seed(0)
    network = FlattenConcatStateActionValueNet({"x": (4,), "action": (2,)}, {"q_value": (1,)}, [32, 32], nn.ReLU)
    action = torch.randn(6, 2, requires_grad=True)
    with constant(network.parameters()):
        value = network({"x": torch.randn(6, 4), "action": action})["q_value"]
    value.sum().backward()
    assert action.grad is not None
    assert action.grad.abs().sum() > 0.0
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())
    network.hidden[0].requires_grad_(False)
    network({"x": torch.randn(6, 4), "action": action})["q_value"].sum().backward()
    assert [parameter.grad is None for parameter in network.parameters()] == [True] * 2 + [False] * 4


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_copies_have_their_own_parameters(copied):
    network = FlattenConcatPolicyNet({"x": (5,)}, {"a": (3,)}, [16], nn.Tanh)
    inputs = {"x": torch.randn(6, 5)}
    before = network(inputs)["a"]
    other = copied(network)
    torch.testing.assert_close(other(inputs)["a"], before)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(inputs)["a"].any()
    torch.testing.assert_close(network(inputs)["a"], before)


def test_replaced_layers_hooks_and_parameters_take_effect():
    network = FlattenConcatPolicyNet({"x": (5,)}, {"a": (3,)}, [16], nn.Tanh)
    inputs = {"x": torch.randn(6, 5)}
    network(inputs)
    seen = []
    with network.hidden[0].register_forward_hook(lambda *_: seen.append(1)):
        network(inputs)
    assert seen == [1]
    network.heads[0].bias = nn.Parameter(torch.full((3,), 100.0))
    assert network(inputs)["a"].min() > 50.0
    network.heads[0] = nn.Linear(16, 3, bias=False)
    expected = network.heads[0](network.latent(inputs))
    torch.testing.assert_close(network(inputs)["a"], expected)


def test_a_subclass_with_another_forward_uses_its_base_for_a_part():
    class Doubled(FlattenConcatPolicyNet):
        def forward(self, x):
            return {key: 2.0 * logits for key, logits in super().forward(x).items()}

    network, inputs = Doubled({"x": (5,)}, {"a": (3,)}, [16], nn.Tanh), {"x": torch.randn(6, 5, requires_grad=True)}
    torch.testing.assert_close(network(inputs)["a"], 2.0 * network.heads[0](network.latent(inputs)))
    (first,) = torch.autograd.grad(network(inputs)["a"].sum(), inputs["x"], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), inputs["x"])
    assert second.abs().sum() > 0.0


def test_second_derivatives_are_refused():
    network, x = FlattenConcatPolicyNet({"x": (5,)}, {"a": (3,)}, [16], nn.Tanh), torch.randn(6, 5, requires_grad=True)
    with pytest.raises(NotImplementedError, match="Second derivatives"):
        torch.autograd.grad(network({"x": x})["a"].sum(), x, create_graph=True)


def test_networks_can_be_mapped_over_sets_of_parameters_and_traced():
    network, x = FlattenConcatPolicyNet({"x": (5,)}, {"a": (3,)}, [16], nn.Tanh), torch.randn(6, 5)
    expected = network({"x": x})["a"]
    stacked = {
        name: parameter.detach()[None].repeat(2, *[1] * parameter.dim())
        for name, parameter in network.named_parameters()
    }
    mapped = torch.vmap(lambda one: torch.func.functional_call(network, one, ({"x": x},))["a"])(stacked)
    torch.testing.assert_close(mapped[1], expected)

    class Traced(nn.Module):
        def __init__(self):
            super().__init__()
            self.network = network

        def forward(self, x):
            return self.network({"x": x})["a"]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(Traced(), x)
    torch.testing.assert_close(traced(x[:2]), expected[:2])
