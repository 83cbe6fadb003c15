"""Products of matrices: the same numbers, and a setting of the process that is left as it was found."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.train.utils import matrix_products
from maze.train.utils.matrix_products import WORTH_IT, MatrixProducts, multiplied_by_onednn, onednn_is_faster

SETTINGS = torch.backends.mkldnn.matmul


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


@pytest.mark.skipif(not onednn_is_faster(), reason="this processor multiplies with MKL")
@given(seed=st.integers(0, 1000), n_rows=st.integers(1, 300), width=st.integers(1, 200))
@settings(max_examples=20, deadline=None, derandomize=True)
def test_losses_and_gradients_are_those_of_mkl(seed, n_rows, width):
    torch.manual_seed(seed)
    net, rows = network(width), torch.randn(n_rows, 7)

    def loss_and_gradients():
        loss = net(rows).square().mean()
        return [loss, *torch.autograd.grad(loss, list(net.parameters()))]

    expected = loss_and_gradients()
    with multiplied_by_onednn():
        found = loss_and_gradients()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@given(width=st.integers(1, 300), n_rows=st.integers(1, 5000), is_faster=st.booleans())
@settings(max_examples=50, deadline=None, derandomize=True)
def test_large_products_go_where_they_are_fast(width, n_rows, is_faster):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_products, "onednn_is_faster", lambda: is_faster)
        products = MatrixProducts(network(width).parameters()).for_batch(n_rows)
    is_large = n_rows * max(width * width, 7 * width) >= WORTH_IT
    assert isinstance(products, nullcontext) != (is_large and is_faster)


def test_the_setting_is_put_back_even_after_an_error():
    before = SETTINGS.fp32_precision
    with pytest.raises(ZeroDivisionError), multiplied_by_onednn():
        _ = 1 / (SETTINGS.fp32_precision != "bf16")
    assert SETTINGS.fp32_precision == before


def test_networks_without_matrices_have_nothing_to_multiply():
    assert isinstance(MatrixProducts(nn.Conv2d(1, 2, 3).parameters()).for_batch(10**9), nullcontext)
