"""Pictures of models."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
from torch import nn

from maze.perception.blocks import ConcatenationBlock, DenseBlock, InferenceBlock, InferenceGraph, LinearOutputBlock

SIGNATURES = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}


@pytest.fixture(params=["graphviz", "text"])
def backend(request, monkeypatch):
    """Pictures with and without pygraphviz."""
    if request.param == "text":
        monkeypatch.setitem(sys.modules, "pygraphviz", None)
    elif importlib.util.find_spec("pygraphviz") is None:
        pytest.skip("pygraphviz is not installed")
    return request.param


def model() -> InferenceBlock:
    left = DenseBlock("inventory", "left", (16,), [64], nn.ReLU)
    right = DenseBlock("order", "right", (2,), [4], nn.ReLU)
    joint = ConcatenationBlock(["left", "right"], "joint", left.out_shapes() + right.out_shapes(), -1)
    action = LinearOutputBlock("joint", "action", joint.out_shapes(), 3)
    return InferenceBlock(
        ["inventory", "order", "mask"],
        "action",
        [(16,), (2,), (3,)],
        {"left": left, "right": right, "joint": joint, "action": action},
    )


def test_pictures_are_saved_in_all_formats(backend, tmp_path):
    InferenceGraph(model()).save("policy_0", tmp_path / "graphs", formats=("pdf", "png", "svg"))
    for suffix, signature in SIGNATURES.items():
        assert (tmp_path / "graphs" / f"policy_0.{suffix}").read_bytes().startswith(signature)


def test_pdf_and_png_are_written_by_default(tmp_path):
    InferenceGraph(model()).save(name="critic", save_path=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic.pdf", "critic.png"]


def test_the_picture_holds_every_block_and_tensor_with_shapes_and_parameters(backend):
    picture = InferenceGraph(model()).picture("policy", "svg").decode()
    for text in ("inventory", "order", "left", "right", "joint", "action", "DenseBlock", "1,088 parameters (83.2%)"):
        assert text in picture
    assert ("mask" in picture) == (backend == "graphviz")  # no block takes it


def test_the_blue_of_a_block_is_deeper_the_more_parameters_it_has():
    pytest.importorskip("pygraphviz")
    picture = InferenceGraph(model()).picture("policy", "svg").decode()
    fills = dict(re.findall(r"<title>block (\w+)</title>\s*<polygon fill=\"#([0-9a-f]{6})\"", picture))
    red = [int(fills[name][:2], 16) for name in ("joint", "right", "action", "left")]
    assert red == sorted(red, reverse=True)
    assert len(set(red)) == 4


def test_keys_may_hold_any_characters(backend):
    key = 'aktion->"{<Größe>}\\n $x_$ &amp;'  # special to Graphviz, to Matplotlib's formulas, and to XML
    block = InferenceBlock("x", key, (2,), {key: LinearOutputBlock("x", key, (2,), 1)})
    assert InferenceGraph(block).picture("$_$ <t>", "svg").startswith(b"<?xml")


@pytest.mark.parametrize("block_execution", [True, False])
def test_show_opens_a_window_and_blocks_only_on_request(monkeypatch, block_execution):
    from matplotlib import pyplot as plt

    shown = []
    plt.switch_backend("agg")
    plt.close("all")  # figures that earlier tests left open
    monkeypatch.setattr(plt, "show", lambda block: shown.append((block, plt.get_figlabels())))
    InferenceGraph(model()).show(name="policy", block_execution=block_execution)
    plt.close("all")
    assert shown == [(block_execution, ["policy"])]
