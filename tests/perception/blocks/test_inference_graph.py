"""Pictures of models."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks import ConcatenationBlock, DenseBlock, InferenceBlock, InferenceGraph, LinearOutputBlock
from maze.perception.blocks.graph_drawing import model_graph, render
from maze.perception.blocks.graph_layout import layered_layout

BACKENDS = [
    "matplotlib",
    pytest.param(
        "graphviz",
        marks=pytest.mark.skipif(importlib.util.find_spec("pygraphviz") is None, reason="pygraphviz not installed"),
    ),
]
SIGNATURES = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}


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


@pytest.mark.parametrize("backend", BACKENDS)
def test_pictures_are_saved_in_all_formats(backend, tmp_path):
    InferenceGraph(model(), backend=backend).save("policy_0", tmp_path / "graphs", formats=("pdf", "png", "svg"))
    for suffix, signature in SIGNATURES.items():
        assert (tmp_path / "graphs" / f"policy_0.{suffix}").read_bytes().startswith(signature)


def test_pdf_and_png_are_written_unless_told_otherwise(tmp_path):
    InferenceGraph(model(), backend="matplotlib").save(name="critic", save_path=str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic.pdf", "critic.png"]


def test_the_picture_holds_every_block_and_tensor_with_shapes_and_parameters():
    graph = model_graph(model(), title="policy")
    assert set(graph.nodes) == {
        *(f"tensor {key}" for key in ("inventory", "order", "mask", "left", "right", "joint", "action")),
        *(f"block {name}" for name in ("left", "right", "joint", "action")),
    }
    assert len(graph.edges) == 5 + 4
    assert graph.nodes["tensor inventory"].text == "inventory\n16"
    assert "(not used)" in graph.nodes["tensor mask"].text
    assert "DenseBlock" in graph.nodes["block left"].text
    assert "1,088 parameters (83.2%)" in graph.nodes["block left"].text


def test_the_blue_of_a_block_is_deeper_the_more_parameters_it_has():
    nodes = model_graph(model(), title="policy").nodes
    depths = [nodes[f"block {name}"].depth for name in ("joint", "right", "action", "left")]
    assert depths == sorted(depths)
    assert depths[0] == 0.0
    brightness = [int(nodes[f"block {name}"].fill[1:3], 16) for name in ("joint", "right", "action", "left")]
    assert brightness == sorted(brightness, reverse=True)
    assert len(set(brightness)) == 4


def test_without_pygraphviz_pictures_are_drawn_by_matplotlib(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert b"Matplotlib" in render(model_graph(model(), title="policy"), "svg", backend=None)


def test_graphviz_without_pygraphviz_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(ConfigError, match=r"maze-rl\[graph\]"):
        render(model_graph(model(), title="policy"), "svg", backend="graphviz")


def test_unknown_formats_and_backends_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="pdf, png or svg, found 'gif'"):
        InferenceGraph(model()).save("policy", tmp_path, formats=["gif"])
    with pytest.raises(ConfigError, match="graphviz, matplotlib, found 'dot'"):
        InferenceGraph(model(), backend="dot").save("policy", tmp_path)


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_may_hold_any_characters(backend):
    key = 'aktion->"{<Größe>}\\n $x_$ &amp;'  # special to Graphviz, to Matplotlib's formulas, and to XML
    block = InferenceBlock("x", key, (2,), {key: LinearOutputBlock("x", key, (2,), 1)})
    assert render(model_graph(block, title="$_$ <t>"), "svg", backend).startswith(b"<?xml")


@st.composite
def acyclic_graphs(draw):
    n_nodes = draw(st.integers(1, 14))
    sizes = {node: (draw(st.integers(10, 120)), draw(st.integers(10, 60))) for node in range(n_nodes)}
    pairs = [(start, end) for start in range(n_nodes) for end in range(start + 1, n_nodes)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=30)) if pairs else []
    return sizes, edges


@given(acyclic_graphs())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_boxes_do_not_overlap_and_edges_pass_beside_them_and_downwards(graph):
    sizes, edges = graph
    layout = layered_layout(sizes, edges, horizontal_gap=20, vertical_gap=30)

    def box(node: int) -> tuple[float, float, float, float]:
        (x, y), (width, height) = layout.centres[node], sizes[node]
        return x - width / 2, x + width / 2, y - height / 2, y + height / 2

    for node in sizes:
        left, right, top, bottom = box(node)
        assert left >= -1e-6
        assert right <= layout.width + 1e-6
        assert top >= -1e-6
        assert bottom <= layout.height + 1e-6
        for other in range(node):
            other_left, other_right, other_top, other_bottom = box(other)
            apart = left >= other_right or other_left >= right or top >= other_bottom or other_top >= bottom
            assert apart, (node, other)
    for (start, end), route in layout.routes.items():
        layers = [layer for layer, _ in route]
        assert layers == list(range(layers[0], layers[-1] + 1))
        assert len(layers) > 1
        for layer, x in route[1:-1]:  # vertical through this layer: beside all of its boxes
            top, bottom = layout.layer_bounds[layer]
            for node in set(sizes) - {start, end}:
                left, right, _, _ = box(node)
                if top <= layout.centres[node][1] <= bottom:
                    assert not left < x < right, (start, end, node)


def test_a_chain_is_drawn_as_a_straight_line():
    layout = layered_layout({"a": (10, 5), "b": (50, 5), "c": (20, 5)}, [("a", "b"), ("b", "c")], 20, 30)
    assert {x for x, _ in layout.centres.values()} == {25.0}
    assert layout.width == 50


@pytest.mark.parametrize("block_execution", [True, False])
def test_show_opens_a_window_and_waits_only_when_told(monkeypatch, block_execution):
    from matplotlib import pyplot as plt

    shown = []
    plt.switch_backend("agg")
    monkeypatch.setattr(plt, "show", lambda block: shown.append((block, plt.get_figlabels())))
    InferenceGraph(model(), backend="matplotlib").show(name="policy", block_execution=block_execution)
    plt.close("all")
    assert shown == [(block_execution, ["policy"])]
