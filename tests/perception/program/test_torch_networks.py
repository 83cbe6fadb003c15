"""Networks evaluated together, and populations in torch: what the networks themselves compute, and its gradients."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks import DenseBlock
from maze.perception.models.built_in.flatten_concat import FlattenConcatPolicyNet, FlattenConcatStateActionValueNet
from maze.perception.program.network_program import JointEvaluation

SHAPES = {"observation": (3,), "action": (2,)}


def twins(hidden_units=(8, 8), non_lin=nn.ReLU, heads=None, shapes=None, seed=0, n=2):
    torch.manual_seed(seed)
    values = heads or {"q_value": (1,)}
    return [FlattenConcatStateActionValueNet(shapes or SHAPES, values, list(hidden_units), non_lin) for _ in range(n)]


def runs_programs(evaluation):
    return bool(evaluation._programs)


def random_inputs(shapes, batch_shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn((*batch_shape, *shape), generator=generator).requires_grad_() for key, shape in shapes.items()
    }


def loss_of(outputs):
    """Every output of every network counts, each with another weight."""
    values = [value for of_network in outputs for value in of_network.values()]
    return sum((index + 1) * (value * torch.cos(value)).sum() for index, value in enumerate(values))


@settings(max_examples=25, deadline=None)
@given(
    hidden_units=st.lists(st.integers(1, 20), min_size=0, max_size=3),
    non_lin=st.sampled_from([nn.ReLU, nn.Tanh]),
    n_networks=st.integers(1, 3),
    head_sizes=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    shapes=st.sampled_from([SHAPES, {"a": (3,)}, {"a": (2, 3), "b": (), "c": (4,)}, {"wide": (30,)}]),
    batch_shape=st.sampled_from([(1,), (7,), (2, 5), (3, 1, 2), ()]),
)
def test_outputs_and_gradients_are_those_of_the_networks(
    hidden_units, non_lin, n_networks, head_sizes, shapes, batch_shape
):
    heads = {f"head_{index}": (size,) for index, size in enumerate(head_sizes)}
    networks = twins(hidden_units, non_lin, heads, shapes, n=n_networks)
    together = JointEvaluation(networks)
    assert runs_programs(together)
    parameters = [p for network in networks for p in network.parameters()]
    inputs = random_inputs(shapes, batch_shape)
    wanted = [*inputs.values(), *parameters]
    expected = [network(inputs) for network in networks]
    found = together(inputs)
    for one, other in zip(expected, found, strict=True):
        assert list(one) == list(other)
        for key in one:
            torch.testing.assert_close(other[key], one[key], rtol=0, atol=0)
    gradients = torch.autograd.grad(loss_of(found), wanted)
    for ours, theirs in zip(gradients, torch.autograd.grad(loss_of(expected), wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_values_are_the_same():
    networks, inputs = twins(), random_inputs(SHAPES, (6,))
    with torch.no_grad():
        found = JointEvaluation(networks)(inputs)
    for network, outputs in zip(networks, found, strict=True):
        torch.testing.assert_close(outputs["q_value"], network(inputs)["q_value"].detach())
        assert not outputs["q_value"].requires_grad


def test_networks_go_on_learning():
    networks, inputs = twins(), random_inputs(SHAPES, (5,))
    together = JointEvaluation(networks)
    together(inputs)
    with torch.no_grad():
        for parameter in networks[1].parameters():
            parameter.mul_(2.0)
    networks[0].hidden[0].weight = nn.Parameter(torch.ones_like(networks[0].hidden[0].weight))
    for network, outputs in zip(networks, together(inputs), strict=True):
        torch.testing.assert_close(outputs["q_value"], network(inputs)["q_value"])


def evaluated(networks):
    inputs = random_inputs(SHAPES, (5,))
    return JointEvaluation(networks), inputs


def test_somebody_who_listens_to_a_layer_hears_it():
    networks = twins()
    evaluation, inputs = evaluated(networks)
    evaluation(inputs)
    heard = []
    handle = networks[1].hidden[1].register_forward_hook(lambda *_: heard.append(1))
    evaluation(inputs)
    assert heard == [1]
    handle.remove()
    networks[0].register_forward_hook(lambda module, args, output: {"q_value": output["q_value"] * 0 + 7})
    assert evaluation(inputs)[0]["q_value"].eq(7).all()


def test_a_layer_that_was_replaced_counts():
    networks = twins()
    evaluation, inputs = evaluated(networks)
    evaluation(inputs)
    networks[0].hidden[1] = nn.Tanh()
    for network, outputs in zip(networks, evaluation(inputs), strict=True):
        torch.testing.assert_close(outputs["q_value"], network(inputs)["q_value"])


class OtherForward(FlattenConcatStateActionValueNet):
    def forward(self, x):
        return {key: value + 1.0 for key, value in super().forward(x).items()}


@pytest.mark.parametrize(
    "networks",
    [
        twins(non_lin=nn.GELU),
        [OtherForward(SHAPES, {"q_value": (1,)}, [8], nn.ReLU)] * 2,
        [twins()[0], twins(non_lin=nn.GELU)[0]],
    ],
    ids=["other activation", "own forward", "one of two"],
)
def test_other_networks_are_left_to_themselves(networks):
    evaluation, inputs = evaluated(networks)
    assert not runs_programs(evaluation)
    for network, outputs in zip(networks, evaluation(inputs), strict=True):
        torch.testing.assert_close(outputs["q_value"], network(inputs)["q_value"])


@pytest.mark.parametrize(
    "networks",
    [
        twins(non_lin=nn.ELU),
        [twins()[0], twins(hidden_units=(8, 9), non_lin=nn.Tanh)[0]],
        [FlattenConcatPolicyNet(SHAPES, {"q_value": (2, 4)}, [8], nn.ReLU)],
        [network.double() for network in twins()],
    ],
    ids=["other activation", "different layers", "matrix of logits", "float64"],
)
def test_any_networks_of_known_operations_are_evaluated_together(networks):
    evaluation, inputs = evaluated(networks)
    assert runs_programs(evaluation)
    dtype = next(networks[0].parameters()).dtype
    inputs = {key: value.detach().to(dtype) for key, value in inputs.items()}
    for network, outputs in zip(networks, evaluation(inputs), strict=True):
        with torch.no_grad():  # networks concatenate in float32
            expected = network.float()({key: value.float() for key, value in inputs.items()})["q_value"]
        torch.testing.assert_close(outputs["q_value"].float(), expected)


def test_what_is_missing_is_said_by_the_networks_themselves():
    block = DenseBlock("observation", "latent", (3,), [4], nn.ReLU)
    with pytest.raises(ConfigError, match=r"DenseBlock \(latent\): expected the input keys"):
        JointEvaluation([block])({"other": torch.ones(2, 3)})
    with pytest.raises(ConfigError, match="was declared with shape"):
        JointEvaluation([block])({"observation": torch.ones(2, 5)})


def test_copies_of_networks_are_on_their_own():
    networks = twins()
    others = copy.deepcopy(networks)
    with torch.no_grad():
        others[0].heads[0].bias.fill_(math.pi)
    together, inputs = JointEvaluation(others), random_inputs(SHAPES, (5,))
    torch.testing.assert_close(together(inputs)[0]["q_value"], others[0](inputs)["q_value"])


def answers(evaluation, networks):
    """What is said of random inputs together, and by each network itself."""
    inputs = random_inputs(SHAPES, (5,))
    return [one["q_value"] for one in evaluation(inputs)], [network(inputs)["q_value"] for network in networks]


def test_layers_that_were_added_count():
    networks = twins()
    evaluation = JointEvaluation(networks)
    evaluation(random_inputs(SHAPES, (5,)))
    networks[0].hidden.append(nn.Linear(8, 8))
    networks[0].hidden.append(nn.ReLU())
    torch.testing.assert_close(*answers(evaluation, networks))


@pytest.mark.parametrize("is_first_seen_with_it", [False, True])
def test_a_forward_set_on_a_network_itself_is_respected(is_first_seen_with_it):
    networks = twins()
    evaluation = JointEvaluation(networks)
    networks[1].forward = lambda inputs: {"q_value": torch.full((5, 1), 7.0)}
    evaluation = JointEvaluation(networks) if is_first_seen_with_it else evaluation
    found, expected = answers(evaluation, networks)
    torch.testing.assert_close(found, expected)
    assert found[1].unique().tolist() == [7.0]


def test_somebody_who_listens_to_all_modules_hears_them():
    evaluation, heard = JointEvaluation(twins()), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: heard.append(type(module)))
    try:
        evaluation(random_inputs(SHAPES, (5,)))
    finally:
        handle.remove()
    assert heard.count(nn.Linear) == 6
