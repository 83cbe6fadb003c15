"""The tangent in NumPy and the linear layer for few features are torch's in all that torch does with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.errors import ConfigError
from maze.perception import weight_init
from maze.perception.blocks import DenseBlock, InferenceBlock
from maze.perception.fast_layers import Linear, Tanh
from maze.perception.program.network_program import in_numpy
from maze.perception.weight_init import activation_type

MANY = (130, 64)


@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(3,), (0, 64), MANY, (130, 8, 8), (65, 256)]),
    kind=st.sampled_from(["rows", "transposed", "strided", "expanded"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    scale=st.sampled_from([1e-6, 1.0, 30.0]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_values_and_derivatives_of_any_order_are_those_of_torch(seed, shape, kind, dtype, scale):
    torch.manual_seed(seed)
    leaf = (scale * torch.randn(shape, dtype=dtype)).requires_grad_()
    x = {
        "rows": lambda: leaf,
        "transposed": lambda: leaf.transpose(0, -1),
        "strided": lambda: leaf[..., ::2],
        "expanded": lambda: leaf.unsqueeze(0).expand(2, *shape),
    }[kind]()
    expected, found = torch.tanh(x), Tanh()(x)
    weights = torch.randn_like(expected)
    tolerance = {"rtol": 2e-6, "atol": 1e-9}
    torch.testing.assert_close(found, expected, **tolerance)
    torch.testing.assert_close(Tanh()(x.detach()), expected.detach(), **tolerance)

    def derivatives(y):
        (first,) = torch.autograd.grad((weights * y).sum(), leaf, create_graph=True)
        return first, *torch.autograd.grad(first.square().sum(), leaf)

    for one, other in zip(derivatives(found), derivatives(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_special_numbers():
    x = torch.zeros(MANY)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    torch.testing.assert_close(Tanh()(x), torch.tanh(x), equal_nan=True, rtol=0.0, atol=0.0)


def test_activation_results_do_not_share_memory():
    """Neither the argument changes nor an earlier result, and an argument that needs no gradient gets none."""
    x = torch.randn(MANY)
    before, tanh = x.clone(), Tanh()
    first, second = tanh(x), tanh(x + 1.0)
    assert torch.equal(x, before)
    torch.testing.assert_close(first, torch.tanh(before))
    assert not second.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(tanh(x), first)


def test_recorded_or_mapped_networks_contain_torch_functions():
    torch.manual_seed(0)
    net, rows = nn.Sequential(Linear(5, 64), Tanh(), nn.Linear(64, 2)), torch.randn(1200, 5)
    expected, others = net(rows).detach(), torch.randn(1200, 5)
    torch.testing.assert_close(torch.func.vmap(net)(rows.view(4, 300, 5)).view(1200, 2), expected)
    per_row = torch.func.vmap(torch.func.grad(lambda row: net(row).sum()))(rows)
    assert per_row.shape == rows.shape
    with pytest.warns(DeprecationWarning, match="trace"):
        traced = torch.jit.trace(net, rows)
    torch.testing.assert_close(traced(others), net(others))
    torch.testing.assert_close(torch.export.export(net, (rows,)).module()(others), net(others))


@pytest.mark.parametrize("shape", [(1200, 5), (60, 20, 5), (3, 5), (1200, 30)])
def test_linear_layers_and_their_gradients_are_those_of_torch(shape):
    torch.manual_seed(0)
    layer, x = Linear(shape[-1], 7), torch.randn(shape, requires_grad=True)
    inputs, upstream = (layer.weight, layer.bias, x), torch.randn(*shape[:-1], 7)
    found, expected = layer(x), nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y, inputs, upstream) for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_slow", [True, False])
def test_blocks_have_it_where_torch_is_slow_and_are_called_as_before(monkeypatch, is_slow):
    monkeypatch.setattr(weight_init, "mkl_is_slow", lambda: is_slow)
    assert activation_type("torch.nn.Tanh", "non_lin") is (Tanh if is_slow else nn.Tanh)
    assert activation_type(nn.ReLU, "non_lin") is nn.ReLU
    with pytest.raises(ConfigError, match=r"model\.non_lin.*not a subclass of Module"):
        activation_type("collections.OrderedDict", "model.non_lin")
    block = DenseBlock("x", "y", (5,), [64, 64], "torch.nn.Tanh")
    assert "Tanh" in block.extra_repr()
    network = InferenceBlock("x", "y", (5,), {"y": block})
    program, rows = in_numpy(network), np.random.default_rng(0).standard_normal((200, 5), dtype=np.float32)
    assert program is not None
    with torch.no_grad():
        expected = network({"x": torch.from_numpy(rows)})["y"]
    np.testing.assert_allclose(program({"x": rows})["y"], expected, rtol=1e-5, atol=1e-6)
