"""What holds for every perception block, on random settings and shapes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maze.core.errors import ConfigError
from maze.perception import blocks
from maze.perception.blocks import PerceptionBlock
from maze.perception.blocks.recurrent.recurrent_cell import recurrent_cells
from maze.perception.program.network_program import in_numpy, population_in_numpy
from tests.perception.blocks.block_cases import CASES, random_input

every_block = pytest.mark.parametrize("case", CASES)
WITHOUT_GRADIENT = (
    # Scores that all lie on one side of the leaky ReLU shift together, which the softmax does not see.
    "attention_receiver",
    # At the last time step the backward direction is at its first.
    "lstm_block.net.weight_hh_l0_reverse",
    # The state is zero where an episode begins.
    "hidden_layer.weight",
)
some_examples = settings(max_examples=6, deadline=None, derandomize=True)


def built(case: str, data: st.DataObject) -> PerceptionBlock:
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    return CASES[case](data)


def test_every_block_of_the_package_has_a_case():
    without_case = {"PerceptionBlock", "ShapeNormalizationBlock", "InferenceGraph"}
    assert len(CASES) == len(set(blocks.__all__) - without_case)


@every_block
@given(data=st.data())
@some_examples
def test_inferred_shapes_are_those_of_a_forward_pass_with_any_batch_dimensions(case, data):
    block = built(case, data).eval()
    for batch_shape in [(), (1,), (3,), (2, 3), (2, 1, 3)]:
        outputs = block(random_input(block, batch_shape))
        assert list(outputs) == block.out_keys
        assert [tuple(outputs[key].shape) for key in block.out_keys] == [
            (*batch_shape, *shape) for shape in block.out_shapes()
        ]


@every_block
@given(data=st.data())
@some_examples
def test_the_size_of_the_output_has_the_name_of_its_kind(case, data):
    block = built(case, data)
    shape = block.out_shapes()[0]
    for name in ("output_units", "output_features"):
        if hasattr(block, name):
            assert getattr(block, name) == shape[-1]
    if hasattr(block, "output_channels"):
        assert block.output_channels == shape[-1 - getattr(block, "convolution_dimension", 2)]
    names = {"output_units", "output_features", "output_channels"}
    widths = ("hidden_units", "hidden_channels", "hidden_features", "self_attn", "dense_block", "conv_block")
    assert not any(hasattr(block, name) for name in widths) or any(hasattr(block, name) for name in names)


@every_block
@given(data=st.data())
@some_examples
def test_each_row_of_a_batch_is_computed_as_if_it_were_alone(case, data):
    block = built(case, data).eval()
    inputs = random_input(block, (2, 3))
    batched = block(inputs)
    for row in np.ndindex(2, 3):
        alone = block({key: tensor[row] for key, tensor in inputs.items()})
        for key in block.out_keys:
            torch.testing.assert_close(batched[key][row], alone[key], rtol=1e-4, atol=1e-5)


@every_block
@given(data=st.data())
@some_examples
def test_gradients_reach_all_parameters_and_inputs(case, data):
    block = built(case, data).train()
    # Nothing masked and all nodes connected: nothing is cut off.
    inputs = {
        key: torch.ones_like(tensor) if key in ("mask", "adjacency") else tensor.requires_grad_()
        for key, tensor in random_input(block, (4,)).items()
    }
    if block.in_keys == ["category"] and not any(True for _ in block.parameters()):
        return  # unit vectors are not function that one could differentiate
    outputs = block(inputs)
    sum((torch.randn_like(outputs[key]) * outputs[key]).sum() for key in block.out_keys[:1]).backward()
    for name, parameter in block.named_parameters():
        if isinstance(block, blocks.InferenceBlock) and name.startswith("blocks.value"):
            continue  # the loss is a function of the first output only
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        assert bool(torch.isfinite(parameter.grad).all()), name
        assert name.endswith(WITHOUT_GRADIENT) or bool((parameter.grad != 0).any()), name
    assert block.in_keys == ["category"] or inputs[block.in_keys[0]].grad is not None


@every_block
@given(data=st.data())
@some_examples
def test_shape_inference_leaves_no_trace(case, data):
    block = built(case, data).train()
    for module in block.modules():
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            if name in module._buffers:
                module._buffers[name] += 1
    block._out_shapes = None
    state = copy.deepcopy(block.state_dict())
    random_state = torch.get_rng_state()
    shapes = block.out_shapes()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in block.modules())
    assert all(torch.equal(state[key], value) for key, value in block.state_dict().items())
    shapes.clear()
    assert block.out_shapes()


@every_block
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_copies_and_pickles_compute_the_same_with_parameters_of_their_own(case, data):
    block = built(case, data).eval()
    inputs = random_input(block, (3,))
    expected = block(inputs)
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        result = twin(inputs)
        assert all(torch.equal(result[key], expected[key]) for key in block.out_keys)
        for ours, theirs in zip(block.parameters(), twin.parameters(), strict=True):
            assert ours.data_ptr() != theirs.data_ptr()
            torch.nn.init.zeros_(theirs)
        assert repr(twin) == repr(block)
    assert all(torch.equal(block(inputs)[key], expected[key]) for key in block.out_keys)


@every_block
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_a_missing_input_is_named(case, data):
    block = built(case, data)
    inputs = random_input(block, (3,))
    missing = block.in_keys[-1]
    del inputs[missing]
    with pytest.raises((ConfigError, KeyError), match=f"'{missing}'"):
        block({**inputs, "unrelated": torch.ones(3)})


@every_block
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_further_inputs_are_ignored(case, data):
    block = built(case, data).eval()
    inputs = random_input(block, (3,))
    outputs = block({"unrelated": torch.ones(1), **inputs})
    assert list(outputs) == block.out_keys


@every_block
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_repr_shows_class_and_output_shapes(case, data):
    block = built(case, data)
    lines = repr(block).splitlines()
    assert lines[0] == type(block).__name__
    assert lines[-1] == f"Out Shapes: {block.out_shapes()}"


@every_block
@given(data=st.data())
@settings(max_examples=3, deadline=None, derandomize=True)
def test_number_of_parameters_is_that_of_the_state(case, data):
    block = built(case, data)
    buffers = dict(block.named_buffers())
    trained = {name: tensor for name, tensor in block.state_dict().items() if name not in buffers}
    assert block.get_num_of_parameters() == sum(tensor.numel() for tensor in trained.values())


@every_block
@given(data=st.data())
@some_examples
def test_programs_compute_what_the_forward_pass_does(case, data):
    block = built(case, data).eval()
    program = in_numpy(block)
    if program is None:
        assert case not in ("dense", "linear_output", "flatten", "flatten_dense", "concatenation", "inference")
        return
    inputs = random_input(block, (3,))
    expected = block(inputs)
    states = {key: np.zeros((3, cell.state_size), np.float32) for key, cell in recurrent_cells(block).items()}
    arrays = {**{key: tensor.numpy() for key, tensor in inputs.items()}, **states}
    stacked = {id(p): np.stack([p.detach().numpy()] * 3) for p in block.parameters()}
    of_rows = population_in_numpy(block, stacked)(arrays, slice(0, 3))
    result = program(arrays)
    assert list(result) == list(of_rows) == [*block.out_keys, *states]
    for key in block.out_keys:
        array = result[key]
        assert array.dtype == of_rows[key].dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(array), expected[key], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(of_rows[key]), expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The tensor attributes.*_flat_weights:UserWarning")  # PyTorch's remark on its LSTM
@every_block
@given(data=st.data())
@settings(max_examples=1, deadline=None, derandomize=True)
def test_an_exported_block_computes_the_same(case, data):
    block = built(case, data).eval()
    inputs = random_input(block, (3,))
    exported = torch.export.export(block, (inputs,))
    expected, result = block(inputs), exported.module()(inputs)
    for key in block.out_keys:
        torch.testing.assert_close(result[key], expected[key])


def add_noise(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + torch.randn_like(tensor)


def test_shape_inference_does_not_advance_the_random_generator_of_sampling_blocks():
    block = blocks.FunctionalBlock("x", "out", (3,), add_noise)
    random_state = torch.get_rng_state()
    assert block.out_shapes() == [(3,)]
    assert torch.equal(torch.get_rng_state(), random_state)
