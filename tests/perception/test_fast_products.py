"""Matrix products by oneDNN: the results of MKL, and a setting of the process that is restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from maze.api.run_context import RunContext
from maze.perception import fast_layers
from maze.perception.fast_layers import Linear, fast_products, onednn_is_faster

SETTINGS = torch.backends.mkldnn.matmul


def network(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


@pytest.mark.skipif(not onednn_is_faster(), reason="MKL is fast on this processor")
@pytest.mark.parametrize(("n_rows", "width"), [(256, 256), (2048, 64), (300, 129)])
def test_losses_and_gradients_equal_those_of_mkl(n_rows, width):
    torch.manual_seed(n_rows)
    net, rows = network(width), torch.randn(n_rows, 7)

    def loss_and_gradients():
        loss = net(rows).square().mean()
        return [loss, *torch.autograd.grad(loss, list(net.parameters()))]

    expected = loss_and_gradients()
    with fast_products(net.parameters(), n_rows):
        assert SETTINGS.fp32_precision == "bf16"
        found = loss_and_gradients()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("is_faster", "n_rows", "width", "setting"),
    [(True, 64, 256, "bf16"), (True, 63, 256, None), (False, 64, 256, None), (True, 1, 3000, "bf16")],
)
def test_only_large_products_change_the_setting_until_the_end(monkeypatch, is_faster, n_rows, width, setting):
    monkeypatch.setattr(fast_layers, "onednn_is_faster", lambda: is_faster)
    before = SETTINGS.fp32_precision
    with pytest.raises(ZeroDivisionError), fast_products(network(width).parameters(), n_rows):
        _ = 1 / (SETTINGS.fp32_precision != (setting or before))
    assert SETTINGS.fp32_precision == before


@pytest.mark.parametrize(("n_rows", "is_by_mkl"), [(4096, True), (4097, False)])
def test_linear_layers_compute_small_products_by_mkl(monkeypatch, n_rows, is_by_mkl):
    monkeypatch.setattr(fast_layers, "onednn_is_faster", lambda: True)
    linear, seen = torch.nn.functional.linear, []
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda *args: (seen.append(SETTINGS.fp32_precision), linear(*args))[1]
    )
    layer = Linear(64, 4)
    with fast_products(network(256).parameters(), 2048):
        layer(torch.zeros(n_rows, 64))
        with pytest.raises(RuntimeError, match="shapes"):
            layer(torch.zeros(3, 5))
        assert SETTINGS.fp32_precision == "bf16"
    assert seen == ["none" if is_by_mkl else "bf16", "none"]


def test_networks_without_matrices_have_nothing_to_multiply(monkeypatch):
    monkeypatch.setattr(fast_layers, "onednn_is_faster", lambda: True)
    before = SETTINGS.fp32_precision
    with fast_products(nn.Conv2d(64, 64, 3).parameters(), 10**9):
        assert SETTINGS.fp32_precision == before


def test_runs_with_large_minibatches_learn_by_fast_products(monkeypatch):
    monkeypatch.setattr(fast_layers, "onednn_is_faster", lambda: True)
    before, seen = SETTINGS.fp32_precision, []
    adam = torch._fused_adam_
    monkeypatch.setattr(torch, "_fused_adam_", lambda *a, **k: (seen.append(SETTINGS.fp32_precision), adam(*a, **k))[1])
    sizes = {"algorithm.batch_size": 64, "algorithm.initial_buffer_size": 100, "algorithm.epoch_length": 1}
    small = {**sizes, "algorithm.rollout_evaluator.n_episodes": 1}
    with RunContext("Pendulum-v1", algorithm="sac", model="flatten_concat", silent=True, overrides=small) as rc:
        rc.train(n_epochs=1)
    assert set(seen) == {"bf16"}
    assert before == SETTINGS.fp32_precision
