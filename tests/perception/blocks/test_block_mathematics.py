"""Blocks compared with reference implementations and with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from maze.perception import blocks
from maze.perception.blocks.joint_blocks import set_blocks

few = settings(max_examples=10, deadline=None, derandomize=True)


def graph(n_nodes: int, directed: bool = False) -> torch.Tensor:
    adjacency = (torch.rand(n_nodes, n_nodes) < 0.5).float().fill_diagonal_(0.0)
    return adjacency if directed else torch.triu(adjacency) + torch.triu(adjacency).T


def edge_index(adjacency: torch.Tensor) -> torch.Tensor:
    """Edges from sender to receiver; rows of an adjacency matrix are receivers."""
    return adjacency.T.nonzero().T


@given(seed=st.integers(0, 1000), n_nodes=st.integers(2, 6), directed=st.booleans())
@few
def test_graph_convolution_equals_torch_geometric(seed, n_nodes, directed):
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(seed)
    block = blocks.GraphConvBlock(
        ["x", "adjacency"], "out", [(n_nodes, 3), (n_nodes, n_nodes)], [4], True, nn.Identity, 1.0, False, True
    )
    layer = block.net["graph_conv_0"]
    nn.init.normal_(layer.bias)
    features, adjacency = torch.randn(n_nodes, 3), graph(n_nodes, directed)
    reference = geometric.GCNConv(3, 4)
    reference.lin.weight.data.copy_(layer.linear.weight)
    reference.bias.data.copy_(layer.bias)
    expected = reference(features, edge_index(adjacency))
    torch.testing.assert_close(block({"x": features, "adjacency": adjacency})["out"], expected)


@given(seed=st.integers(0, 1000), n_nodes=st.integers(2, 6), n_heads=st.integers(1, 3), average=st.booleans())
@few
def test_graph_attention_equals_torch_geometric(seed, n_nodes, n_heads, average):
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(seed)
    shapes = [(n_nodes, 3), (n_nodes, n_nodes)]
    block = blocks.GraphAttentionBlock(
        ["x", "adjacency"], "out", shapes, [4], nn.Identity, n_heads, 0.2, average, attention_dropout=0.0
    )
    layer = block.net["graph_attention_0"]
    features, adjacency = torch.randn(n_nodes, 3), graph(n_nodes, directed=True)
    reference = geometric.GATConv(3, 4, heads=n_heads, concat=not average, negative_slope=0.2, bias=False)
    reference.lin.weight.data.copy_(layer.linear.weight)
    reference.att_src.data.copy_(layer.attention_sender.unsqueeze(0))
    reference.att_dst.data.copy_(layer.attention_receiver.unsqueeze(0))
    expected = reference(features, edge_index(adjacency))
    torch.testing.assert_close(block({"x": features, "adjacency": adjacency})["out"], expected, rtol=1e-4, atol=1e-5)


def test_a_node_without_connections_neither_sends_nor_receives():
    block = blocks.GraphConvBlock(
        ["x", "adjacency"], "out", [(3, 2), (3, 3)], [2], False, nn.Identity, 0.0, False, True
    )
    adjacency = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    features = torch.randn(3, 2, requires_grad=True)
    output = block({"x": features, "adjacency": adjacency})["out"]
    output.sum().backward()
    assert output[2].tolist() == [0.0, 0.0]
    assert features.grad is not None
    assert bool(torch.isfinite(features.grad).all())
    torch.testing.assert_close(output[0], block.net["graph_conv_0"].linear(features)[1])


@pytest.mark.parametrize("padding_mask", [True, False])
def test_multi_head_attention_equals_pytorch_with_inverted_masks(padding_mask):
    torch.manual_seed(0)
    mask_shape = (5,) if padding_mask else (3, 5)
    block = blocks.MultiHeadAttentionBlock(
        ["q", "k", "v", "mask"],
        ["out", "weights"],
        [(3, 4), (5, 6), (5, 2), mask_shape],
        num_heads=2,
        dropout=None,
        add_input_to_output=True,
        bias=True,
        add_bias_kv=False,
        add_zero_attn=False,
        kdim=6,
        vdim=2,
        use_key_padding_mask=padding_mask,
    )
    query, key, value = torch.randn(7, 3, 4), torch.randn(7, 5, 6), torch.randn(7, 5, 2)
    mask = (torch.rand(7, *mask_shape) < 0.5).float()
    mask[..., 0] = 1.0
    masks = {"key_padding_mask": mask == 0} if padding_mask else {"attn_mask": (mask == 0).repeat_interleave(2, dim=0)}
    expected, weights = block.self_attn(query, key, value, **masks)
    result = block({"q": query, "k": key, "v": value, "mask": mask})
    torch.testing.assert_close(result["out"], expected + query)
    torch.testing.assert_close(result["weights"], weights)
    ignored = (mask == 0).reshape(7, -1, 5).expand(7, 3, 5)
    assert bool((result["weights"][ignored] == 0).all())


def test_attention_to_nothing_is_zero_and_leaves_gradients_finite():
    block = blocks.SelfAttentionSeqBlock(["x", "mask"], "out", [(3, 4), (3,)], 2, None, False, True)
    sequence = torch.randn(2, 3, 4, requires_grad=True)
    output = block({"x": sequence, "mask": torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 1.0]])})["out"]
    output.sum().backward()
    assert bool((output[0] == 0).all())
    assert bool((output[1] != 0).any())
    assert sequence.grad is not None
    assert bool(torch.isfinite(sequence.grad).all())


def test_masked_elements_do_not_influence_self_attention():
    block = blocks.SelfAttentionSeqBlock(["x", "mask"], "out", [(3, 4), (3,)], 2, None, False, True)
    sequence, mask = torch.randn(3, 4), torch.tensor([1.0, 1.0, 0.0])
    changed = sequence.clone()
    changed[2] += 1.0
    before, after = (block({"x": x, "mask": mask})["out"] for x in (sequence, changed))
    torch.testing.assert_close(before[:2], after[:2])


def test_convolutional_self_attention_equals_attention_over_the_list_of_pixels():
    torch.manual_seed(0)
    block = blocks.SelfAttentionConvBlock("x", ["out", "weights"], (3, 2, 4), 5, None, True, True)
    nn.init.constant_(block.gamma, 0.5)
    image = torch.randn(6, 3, 2, 4)
    query, key, value = (
        conv(image).flatten(2).transpose(1, 2).unsqueeze(1) for conv in (block.query, block.key, block.value)
    )
    attended = nn.functional.scaled_dot_product_attention(query, key, value, scale=1.0).squeeze(1)
    result = block({"x": image})
    torch.testing.assert_close(result["out"], image + 0.5 * attended.transpose(1, 2).reshape(image.shape))
    torch.testing.assert_close(result["weights"].sum(-1), torch.ones(6, 8))


def test_convolutional_self_attention_starts_as_the_identity():
    image = torch.randn(2, 3, 4, 4)
    block = blocks.SelfAttentionConvBlock("x", "out", (3, 4, 4), 2, None, add_input_to_output=True, bias=True)
    assert torch.equal(block({"x": image})["out"], image)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_lstm_equals_pytorch_followed_by_one_layer_per_time_step(bidirectional):
    block = blocks.LSTMBlock("x", "out", (5, 3), 4, 2, bidirectional, nn.SELU)
    sequence = torch.randn(2, 7, 5, 3)
    states, _ = block.net(sequence.flatten(0, 1))
    expected = nn.functional.selu(block.output[0](states)).reshape(2, 7, 5, 4)
    torch.testing.assert_close(block({"x": sequence})["out"], expected)


def test_the_last_step_is_the_last_of_sequences_of_any_length():
    block = blocks.LSTMLastStepBlock("x", "out", (5, 3), 4, 1, False, nn.Tanh)
    sequence = torch.randn(2, 9, 3)
    torch.testing.assert_close(block({"x": sequence})["out"], block.lstm_block({"x": sequence})["out_lstm"][:, -1])


@given(seed=st.integers(0, 100), is_training=st.booleans(), pooling=st.sampled_from(["max", "mean", "sum", "min"]))
@few
def test_point_net_does_not_depend_on_the_order_of_points_nor_on_masked_points(seed, is_training, pooling):
    torch.manual_seed(seed)
    block = blocks.PointNetFeatureBlock(
        ["x", "mask"],
        "out",
        [(5, 3), (5,)],
        4,
        pooling,
        use_feature_transform=True,
        use_batch_norm=True,
        non_lin=nn.ReLU,
    ).train(is_training)
    points, mask = torch.randn(2, 5, 3), torch.ones(2, 5)
    order = torch.randperm(5)
    expected = block({"x": points, "mask": mask})["out"]
    torch.testing.assert_close(block({"x": points[:, order], "mask": mask})["out"], expected, rtol=1e-4, atol=1e-5)
    with_junk = torch.cat([points, 100.0 * torch.randn(2, 3, 3)], dim=1)
    junk_mask = torch.cat([mask, torch.zeros(2, 3)], dim=1)
    torch.testing.assert_close(block({"x": with_junk, "mask": junk_mask})["out"], expected, rtol=1e-4, atol=1e-5)


def test_a_single_point_is_normalised_by_the_statistics_of_earlier_ones():
    """One point has no deviation: a last minibatch with a single valid one must not end a run."""
    torch.manual_seed(1)
    settings = {"use_feature_transform": True, "use_batch_norm": True, "non_lin": nn.ReLU}
    block = blocks.PointNetFeatureBlock(["x", "mask"], "out", [(5, 3), (5,)], 4, "max", **settings)
    block({"x": torch.randn(8, 5, 3), "mask": torch.ones(8, 5)})
    known = {name: value.clone() for name, value in block.state_dict().items()}
    single = {"x": torch.randn(1, 5, 3), "mask": torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]])}
    in_training = block(single)["out"]
    torch.testing.assert_close(block.state_dict(), known, rtol=0.0, atol=0.0)
    torch.testing.assert_close(block.eval()(single)["out"], in_training)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("mean", [[2.0, -1.0], [0.0, 0.0]]),
        ("sum", [[4.0, -2.0], [0.0, 0.0]]),
        ("max", [[3.0, 1.0], [0.0, 0.0]]),
        ("min", [[1.0, -3.0], [0.0, 0.0]]),  # nothing valid in the second sample: zero, not infinity
    ],
)
def test_masked_pooling_of_hand_worked_numbers(pooling, expected):
    block = blocks.MaskedGlobalPoolingBlock(["x", "mask"], "out", [(3, 2), (3,)], pooling, pooling_dim=1)
    features = torch.tensor([[[1.0, 1.0], [9.0, -9.0], [3.0, -3.0]]]).repeat(2, 1, 1)
    mask = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    assert block({"x": features, "mask": mask})["out"].tolist() == expected


@pytest.mark.parametrize(("reduce", "expected"), [(False, [[3.0, 8.0], [9.0, 16.0]]), (True, [11.0, 25.0])])
def test_correlation_of_items_with_one_query(reduce, expected):
    block = blocks.CorrelationBlock(["items", "query"], "out", [(2, 2), (1, 2)], reduce=reduce)
    inputs = {"items": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "query": torch.tensor([[3.0, 4.0]])}
    assert block(inputs)["out"].tolist() == expected


def test_repetition_makes_features_concatenable():
    block = blocks.RepeatToMatchBlock(["x", "items"], "out", [(2,), (3, 4)], repeat_at_idx=1)
    result = block({"x": torch.tensor([[1.0, 2.0]]), "items": torch.zeros(1, 3, 4)})["out"]
    assert result.tolist() == [[[1.0, 2.0]] * 3]


def test_slices_of_hand_worked_numbers():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert blocks.SliceBlock("x", "out", (2, 3), slice_dim=2, slice_idx=-1)({"x": matrix})["out"].tolist() == [2.0, 5.0]
    several = blocks.MultiIndexSlicingBlock("x", "out", (2, 3), select_dim=-1, select_idxs=[2, 0])
    assert several({"x": matrix})["out"].tolist() == [[2.0, 0.0], [5.0, 3.0]]


def test_vgg_halves_the_image_at_each_stage():
    block = blocks.VGGConvolutionBlock("screen", "out", (3, 64, 64), [8, 16, 32], nn.ReLU)
    assert block.out_shapes() == [(32, 8, 8)]
    assert len([layer for layer in block.net if isinstance(layer, nn.Conv2d)]) == 6


def test_strided_convolution_equals_a_plain_convolution_with_its_settings():
    block = blocks.StridedConvolutionBlock(
        "x", "out", (2, 9, 11), [3], [(3, 2)], nn.ReLU, 2, [(2, 1)], [(1, 2)], [(1, 0)], "circular"
    )
    reference = nn.Conv2d(2, 3, (3, 2), stride=(2, 1), dilation=(1, 2), padding=(1, 0), padding_mode="circular")
    reference.load_state_dict(block.net[0].state_dict())
    image = torch.randn(4, 2, 9, 11)
    torch.testing.assert_close(block({"x": image})["out"], reference(image).relu())


def test_functions_of_several_tensors_take_their_list():
    block = blocks.FunctionalBlock(["x", "y"], "out", [(2,), (2,)], lambda tensors: tensors[0] + tensors[1])
    assert block({"x": torch.ones(2), "y": torch.ones(2)})["out"].tolist() == [2.0, 2.0]


def test_functions_are_called_by_the_names_of_their_arguments():
    def minus(y, x, scale=2.0):
        return (x - y) * scale

    block = blocks.FunctionalBlock(["x", "y"], "out", [(2,), (2,)], minus)
    assert block({"x": torch.full((2,), 3.0), "y": torch.ones(2)})["out"].tolist() == [4.0, 4.0]
    keyword_only = blocks.FunctionalBlock("x", "out", [(2,)], lambda *, x: -x)
    assert keyword_only({"x": torch.ones(2)})["out"].tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_flat_input_is_a_sequence_of_one_element(is_masked):
    torch.manual_seed(0)
    arguments = {"num_heads": 2, "dropout": None, "add_input_to_output": True, "bias": True}
    in_keys, mask = (["x", "mask"], [(1,)]) if is_masked else ("x", [])
    flat = blocks.SelfAttentionSeqBlock(in_keys, ["out", "weights"], [(4,), *mask], **arguments)
    sequence = blocks.SelfAttentionSeqBlock(in_keys, ["out", "weights"], [(1, 4), *mask], **arguments)
    sequence.load_state_dict(flat.state_dict())
    assert flat.out_shapes() == [(4,), (1, 1)]
    features, valid = torch.randn(5, 4), torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]).unsqueeze(-1)
    result = flat({"x": features, "mask": valid})
    expected = sequence({"x": features.unsqueeze(1), "mask": valid})
    torch.testing.assert_close(result["out"], expected["out"].squeeze(1))
    torch.testing.assert_close(result["weights"], expected["weights"])
    torch.testing.assert_close(flat({"x": features[0], "mask": valid[0]})["out"], result["out"][0])


@pytest.mark.parametrize("mask", [None, "padding", "attention"])
def test_a_flat_query_attends_to_a_set_and_gets_a_flat_answer(mask):
    torch.manual_seed(0)
    in_keys = ["query", "key", "value"] + ["mask"] * (mask is not None)

    def block(query, mask_shape):
        return blocks.MultiHeadAttentionBlock(
            in_keys,
            "out",
            [query, (3, 5), (3, 5), *([mask_shape] if mask else [])],
            num_heads=2,
            dropout=None,
            add_input_to_output=False,
            bias=True,
            add_bias_kv=False,
            add_zero_attn=False,
            kdim=None,
            vdim=None,
            use_key_padding_mask=mask == "padding",
        )

    flat, sequence = block((4,), (3,)), block((1, 4), (3,) if mask == "padding" else (1, 3))
    sequence.load_state_dict(flat.state_dict())
    tensors = {"query": torch.randn(6, 4), "key": torch.randn(6, 3, 5), "value": torch.randn(6, 3, 5)}
    valid = (torch.rand(6, 3) < 0.5).float()
    result = flat({**tensors, "mask": valid})["out"]
    as_sequence = valid if mask == "padding" else valid.unsqueeze(1)
    expected = sequence({**tensors, "query": tensors["query"].unsqueeze(1), "mask": as_sequence})["out"]
    assert flat.out_shapes() == [(4,)]
    torch.testing.assert_close(result, expected.squeeze(1))


def test_masked_pixels_do_not_influence_the_attention_of_others():
    torch.manual_seed(0)
    block = blocks.SelfAttentionConvBlock(["x", "mask"], ["out", "weights"], [(2, 3, 3), (3, 3)], 2, None, False, True)
    image, mask = torch.randn(1, 2, 3, 3), torch.ones(1, 3, 3)
    mask[0, 1, 2] = 0.0
    other = image.clone()
    other[..., 1, 2] = 100.0
    first, second = (block({"x": pixels, "mask": mask}) for pixels in (image, other))
    counts = mask.flatten().bool()
    torch.testing.assert_close(first["out"].flatten(2)[..., counts], second["out"].flatten(2)[..., counts])
    torch.testing.assert_close(first["weights"].sum(-1), torch.ones(1, 9))
    nothing = block({"x": image, "mask": torch.zeros(1, 3, 3)})
    assert (nothing["out"] == 0).all()


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_among_the_items_of_a_set_is_that_of_torch(is_masked):
    torch.manual_seed(0)
    keys, shapes = (["x", "mask"], [(5, 3), (5,)]) if is_masked else ("x", (5, 3))
    block = blocks.SetAttentionBlock(keys, "out", shapes, [8], num_heads=2, keep_places=False, non_lin=nn.Tanh)
    reference = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        reference.in_proj_weight.copy_(block.query_key_value.weight)
        reference.in_proj_bias.copy_(block.query_key_value.bias)
        reference.out_proj.load_state_dict(block.attended.state_dict())
    x, mask = torch.randn(4, 5, 3), torch.tensor([[1.0, 1.0, 0.0, 1.0, 0.0]] * 4)
    features = block.dense_block.net(x * mask.unsqueeze(-1) if is_masked else x)
    attended, _ = reference(features, features, features, key_padding_mask=mask <= 0 if is_masked else None)
    items = (features + attended)[:, mask[0] > 0] if is_masked else features + attended
    expected = torch.cat([items.mean(1), items.amax(1)], dim=-1)
    torch.testing.assert_close(block({"x": x, "mask": mask})["out"], expected)


@given(
    seed=st.integers(0, 1000),
    channels=st.integers(1, 6),
    layout=st.sampled_from(["HWC", "CHW"]),
    leading=st.sampled_from([(), (3,), (2, 3)]),
    has_gradients=st.booleans(),
)
@few
def test_results_are_independent_of_the_memory_layout_of_images(seed, channels, layout, leading, has_gradients):
    torch.manual_seed(seed)
    shape = (channels, 12, 10) if layout == "CHW" else (12, 10, channels)
    block = blocks.ImageDenseBlock(
        "image", "out", [shape], layout, 1 / 255, [4, 5], [4, 2], [2, 1], [1, 0], [6], nn.Tanh
    )
    layers = [module for module in block.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    images = torch.randint(0, 256, (*leading, *shape), dtype=torch.uint8)

    with torch.set_grad_enabled(has_gradients):
        output = block({"image": images})["out"]

        channels_first = images.flatten(0, -4) if leading else images.unsqueeze(0)
        channels_first = channels_first if layout == "CHW" else channels_first.permute(0, 3, 1, 2).contiguous()
        hidden = channels_first.float() / 255
        for layer in layers:
            hidden = torch.tanh(layer(hidden.flatten(1) if isinstance(layer, nn.Linear) else hidden))
    torch.testing.assert_close(output, hidden.view(*leading, 6))
    if has_gradients:
        weights = list(block.parameters())
        found = torch.autograd.grad(output.square().sum(), weights)
        torch.testing.assert_close(found, torch.autograd.grad(hidden.square().sum(), weights))


def test_scores_of_valid_items_are_those_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    shapes = [(5, 3), (2,), (5,)]
    scores = blocks.ItemScoresBlock(["items", "vector", "mask"], "out", shapes, [4, 3], nn.Tanh, has_mask=True)
    plain = blocks.ItemScoresBlock(["items", "vector"], "out", shapes[:2], [4, 3], nn.Tanh)
    plain.load_state_dict(scores.state_dict())
    inputs = {key: torch.randn(6, *shape) for key, shape in zip(scores.in_keys, shapes, strict=True)}
    inputs["mask"][0] = 0.0  # a row without any item
    found = []
    for block, many in ((plain, 1), (scores, 10**9), (scores, 1)):
        monkeypatch.setattr(set_blocks, "MANY_ROWS", many)
        block.zero_grad()
        output = block(inputs)["out"] * (inputs["mask"] > 0)
        output.square().sum().backward()
        found.append([output.detach(), *(p.grad for p in block.parameters())])
    for one, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, one)


@pytest.mark.parametrize("width", [4, 40])
def test_pooling_and_its_gradient_are_those_of_the_items_that_each_mask_allows(width: int) -> None:
    torch.manual_seed(0)
    block = blocks.SetAttentionBlock(["x", "m", "n"], "out", [(5, 3), (5,), (5,)], [width], 0, False, nn.Tanh)
    masks = [torch.ones(3, 5), torch.tensor([[0.0, 1.0, 0.0, 1.0, 1.0], [0.0] * 5, [1.0, 0.0, 0.0, 0.0, 0.0]])]
    items, weights = torch.randn(3, 5, 3), torch.randn(3, 4 * width)
    if width > 4:
        items[0, 3] = items[0, 1]  # equal maxima share the derivative, as those of `amax`
    items.requires_grad_()
    pooled = block({"x": items, "m": masks[0], "n": masks[1]})["out"]
    (gradient,) = torch.autograd.grad((pooled * weights).sum(), items)
    expected = []
    for index in range(3):
        features = block.dense_block.net(items[index])
        for chosen in (features[mask[index] > 0] for mask in masks):
            expected += [chosen.mean(0), chosen.amax(0)] if len(chosen) else [torch.zeros(width)] * 2
    reference = torch.cat(expected).view(3, 4 * width)
    torch.testing.assert_close(pooled, reference)
    torch.testing.assert_close(gradient, torch.autograd.grad((reference * weights).sum(), items)[0])
    with torch.no_grad():
        torch.testing.assert_close(block({"x": items, "m": masks[0], "n": masks[1]})["out"], reference)
