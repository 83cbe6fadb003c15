"""Recurrent cells: against torch's own layers, by steps and by sequences, in torch and in NumPy."""

import numpy as np
import pytest
import torch
from torch import nn

from maze.core.errors import ConfigError
from maze.perception.blocks import DenseBlock, InferenceBlock, RecurrentCellBlock
from maze.perception.blocks.recurrent.recurrent_cell import PackedRows, SequenceRun, StepRun, recurrent_cells, running
from maze.perception.program.network_program import in_numpy

both_cells = pytest.mark.parametrize("cell", ["lstm", "gru"])
N_FEATURES, SIZE = 3, 4


def block_of(cell):
    torch.manual_seed(0)
    return RecurrentCellBlock("x", "out", (N_FEATURES,), SIZE, cell)


def torch_layer(block, cell):
    """The layer of torch with the same weights; what opens the forget gate is a bias there."""
    layer = (nn.LSTM if cell == "lstm" else nn.GRU)(N_FEATURES, SIZE)
    with torch.no_grad():
        layer.weight_ih_l0.copy_(block.input_layer.weight)
        layer.weight_hh_l0.copy_(block.hidden_layer.weight)
        layer.bias_ih_l0.copy_(block.input_layer.bias)
        layer.bias_hh_l0.copy_(block.hidden_layer.bias)
        if cell == "lstm":
            layer.bias_hh_l0[SIZE : 2 * SIZE] += 1.0
    return layer


def by_steps(block, inputs, state):
    outputs = []
    for step in inputs:
        run = StepRun({block.state_key: state})
        with running([block], run):
            outputs.append(block({"x": step})["out"])
        state = run.final[block.state_key]
    return torch.stack(outputs), state


@both_cells
def test_steps_that_carry_the_state_give_what_the_layer_of_torch_gives_for_the_sequence(cell):
    block, inputs = block_of(cell), torch.randn(6, 2, N_FEATURES)
    expected, final = torch_layer(block, cell)(inputs)
    outputs, state = by_steps(block, inputs, torch.zeros(2, block.state_size))
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(state, torch.cat(final, -1)[0] if cell == "lstm" else final[0])


@both_cells
@pytest.mark.parametrize("lengths", [[3, 3, 3], [2, 5, 1, 5], [1, 1, 4]])
def test_sequences_of_any_lengths_in_any_order_give_what_steps_give(cell, lengths):
    block, lengths = block_of(cell), np.array(lengths)
    n_rows = lengths.sum()
    order = np.random.default_rng(0).permutation(n_rows)
    starts = np.cumsum(lengths) - lengths
    inputs, states = torch.randn(n_rows, N_FEATURES), torch.randn(len(lengths), block.state_size)
    packed = PackedRows(order, starts, lengths, "cpu")
    assert (packed.padded is not None) == (len(set(lengths)) > 1)
    run = SequenceRun([packed], {block.state_key: states})
    with running([block], run):
        with torch.no_grad():
            outputs = block({"x": inputs})["out"]
        with_gradient = block({"x": inputs})["out"]
    torch.testing.assert_close(with_gradient, outputs)
    weights = torch.randn_like(outputs)
    gradients = torch.autograd.grad((with_gradient * weights).sum(), block.parameters())
    total = 0.0
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = order[start : start + length]
        state, following = states[index : index + 1], []
        for row in rows:
            state = block.step(inputs[row][None], state)
            following.append(state[0, :SIZE])
        torch.testing.assert_close(outputs[rows], torch.stack(following).detach())
        torch.testing.assert_close(run.final[block.state_key][index], state[0].detach())
        total = total + (torch.stack(following) * weights[rows]).sum()
    for found, expected in zip(gradients, torch.autograd.grad(total, block.parameters()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@both_cells
def test_numpy_carries_the_state_as_torch_does(cell):
    dense = DenseBlock("observation", "x", (2,), [N_FEATURES], nn.Tanh)
    block = block_of(cell)
    network = InferenceBlock("observation", "out", (2,), {"x": dense, "out": block})
    program, state = in_numpy(network), np.zeros((5, block.state_size), np.float32)
    expected_state = torch.zeros(5, block.state_size)
    for _ in range(4):
        observation = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32) * 30
        outputs = program({"observation": observation, "out.state": state})
        run = StepRun({"out.state": expected_state})
        with running(recurrent_cells(network).values(), run), torch.no_grad():
            expected = network({"observation": torch.from_numpy(observation)})["out"]
        state, expected_state = outputs["out.state"], run.final["out.state"]
        torch.testing.assert_close(torch.from_numpy(outputs["out"].copy()), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.from_numpy(state), expected_state, rtol=1e-4, atol=1e-5)


def test_the_forget_gate_of_an_lstm_is_open_at_first():
    block = block_of("lstm")
    for parameter in block.parameters():
        nn.init.zeros_(parameter)
    state = torch.cat([torch.zeros(1, SIZE), torch.ones(1, SIZE)], -1)
    following = block.step(torch.zeros(1, N_FEATURES), state)
    torch.testing.assert_close(following[0, SIZE:], torch.full((SIZE,), 1 / (1 + np.exp(-1.0))).float())


def test_two_cells_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="another recurrent cell"):
        recurrent_cells(nn.ModuleList([block_of("lstm"), block_of("gru")]))


@pytest.mark.parametrize("settings", [{"cell": "lstmm", "hidden_size": 2}, {"hidden_size": 0}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ConfigError, match="RecurrentCellBlock"):
        RecurrentCellBlock("x", "out", (2,), **settings)
