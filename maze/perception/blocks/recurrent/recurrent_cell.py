"""Recurrent layers whose hidden state is carried from step to step, for single steps and for sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from maze.core.annotations import override
from maze.core.errors import ConfigError, unknown_key_error
from maze.perception.blocks.base import Keys, Shapes, TensorDict
from maze.perception.blocks.shape_normalization import ShapeNormalizationBlock
from maze.perception.program.network_program import Array, ArrayFunction, Places, ProgramReader


class RecurrentCellBlock(ShapeNormalizationBlock):
    """An LSTM or GRU layer that processes one step at a time and carries its hidden state to the next.

    Input `(batch, features)`, output `(batch, hidden_size)`. Policies and critics provide and store the hidden states
    in the context :func:`running`. Outside of it, each row is the first step of an episode, with a zero state.

    LSTM: Hochreiter and Schmidhuber 1997 with the forget gate of Gers et al. 2000, which starts open (1 is added before
    the sigmoid, Jozefowicz et al. 2015). GRU: Cho et al. 2014, as torch computes it.

    :param hidden_size: Number of features of the output.
    :param cell: `lstm` or `gru`.
    :raises ConfigError: The cell is unknown, or `hidden_size` is not positive.
    """

    def __init__(self, in_keys: Keys, out_keys: Keys, in_shapes: Shapes, hidden_size: int, cell: str = "lstm") -> None:
        super().__init__(in_keys, out_keys, in_shapes, in_num_dims=2, out_num_dims=2)
        if cell not in _CELLS:
            raise unknown_key_error(f"{self.block_name}.cell", cell, _CELLS)
        if hidden_size < 1:
            raise ConfigError(f"{self.block_name}.hidden_size: expected at least 1, found {hidden_size}.")
        self.input_units = self.in_shapes[0][-1]
        self.hidden_size = self.output_units = hidden_size
        self.cell: Cell = _CELLS[cell](hidden_size)
        self.state_key = f"{self.out_keys[0]}.state"
        """Name of the hidden state, unique in a network."""
        self.input_layer = nn.Linear(self.input_units, self.cell.n_gates * hidden_size)
        self.hidden_layer = nn.Linear(hidden_size, self.cell.n_gates * hidden_size)
        self.gate_offsets: Tensor
        self.register_buffer("gate_offsets", self.cell.gate_offsets(), persistent=False)
        self.run: Run | None = None
        """Source of the states of the forward pass, see :func:`running`."""

    @property
    def state_size(self) -> int:
        """Number of features of the hidden state; that of an LSTM holds output and cell state."""
        return self.cell.state_size

    @override(ShapeNormalizationBlock)
    def normalized_forward(self, block_input: TensorDict) -> TensorDict:
        inputs = block_input[self.in_keys[0]]
        run = self.run
        if run is None:
            run = StepRun({self.state_key: inputs.new_zeros(inputs.shape[0], self.state_size)})
        return {self.out_keys[0]: run.advance(self, inputs)}

    def describe_forward(self, reader: ProgramReader, inputs: Places) -> Places:
        state = reader.inputs[self.state_key]
        output = ArrayFunction(lambda array: array[..., : self.hidden_size])
        from_input = reader.layer(self.input_layer, inputs[self.in_keys[0]])
        from_state = reader.layer(self.hidden_layer, reader.apply(output, state))
        following = reader.apply(self.cell, from_input, from_state, state)
        reader.carried[self.state_key] = following
        return {self.out_keys[0]: reader.apply(output, following)}

    def step(self, inputs: Tensor, state: Tensor) -> Tensor:
        """Return the states after one step.

        :param inputs: `[batch, features]`.
        :param state: `[batch, state_size]`, the previous states.
        """
        return self.cell.in_torch(self.input_layer(inputs), self.hidden_layer(state[..., : self.hidden_size]), state)

    def unroll(self, inputs: Tensor, batch_sizes: Sequence[int], state: Tensor) -> tuple[Tensor, Tensor]:
        """Process several sequences at once, sorted by decreasing length.

        :param inputs: `[n_rows, features]`: the first steps of all sequences, then the second ones, and so on.
        :param batch_sizes: Number of sequences with a first step, a second one, and so on; not increasing.
        :param state: `[n_sequences, state_size]`, the states before the first steps.
        :return: Outputs `[n_rows, hidden_size]`, and the states after the last step of each sequence.
        """
        layers = self.input_layer, self.hidden_layer
        weights = [layer.weight for layer in layers] + [layers[0].bias, layers[1].bias + self.gate_offsets]
        parts = [part.contiguous().unsqueeze(0) for part in state.chunk(self.cell.n_states, dim=-1)]
        state_parts: Any = parts if len(parts) > 1 else parts[0]
        options = (weights, True, 1, 0.0, True, False)  # biases, one layer, no dropout, training, one direction
        if batch_sizes[0] == batch_sizes[-1]:
            steps = inputs.view(len(batch_sizes), batch_sizes[0], inputs.shape[-1])
            output, *final = self.cell.unrolled(steps, state_parts, *options, False)
            output = output.flatten(0, 1)
        else:
            output, *final = self.cell.unrolled(inputs, torch.tensor(batch_sizes), state_parts, *options)
        return output, torch.cat(final, dim=-1).squeeze(0)


# -- cells -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell(ABC):
    """The computation of a recurrent layer, as a function of network programs."""

    hidden_size: int
    n_gates: ClassVar[int]
    """Number of vectors of the hidden size that the linear layers return."""
    n_states: ClassVar[int] = 1
    """Number of such vectors in the state; the first is the output."""
    unrolled: ClassVar[Callable[..., Any]]
    """The function of torch for sequences."""

    @property
    def state_size(self) -> int:
        """Number of features of the state."""
        return self.n_states * self.hidden_size

    def gate_offsets(self) -> Tensor:
        """Return the offsets of the gates, `[n_gates * hidden_size]`."""
        return torch.zeros(self.n_gates * self.hidden_size)

    @abstractmethod
    def in_torch(self, *tensors: Tensor) -> Tensor:
        """Compute the next states `[..., state_size]`.

        :param tensors: The linear functions of the input and of the previous output, `[..., n_gates * hidden_size]`,
            and the previous states, `[..., state_size]`.
        """

    @abstractmethod
    def in_numpy(self, *arrays: Array) -> Array:
        """Compute the same for arrays."""


class _LSTM(Cell):
    n_gates, n_states = 4, 2
    unrolled = staticmethod(torch.lstm)

    @override(Cell)
    def gate_offsets(self) -> Tensor:
        offsets = super().gate_offsets()
        offsets[self.hidden_size : 2 * self.hidden_size] = 1.0
        return offsets

    @override(Cell)
    def in_torch(self, *tensors: Tensor) -> Tensor:
        from_input, from_state, state = tensors
        enter, forget, new, leave = (from_input + from_state).chunk(4, dim=-1)
        memory = torch.sigmoid(forget + 1.0) * state[..., self.hidden_size :] + torch.sigmoid(enter) * torch.tanh(new)
        return torch.cat([torch.sigmoid(leave) * torch.tanh(memory), memory], dim=-1)

    @override(Cell)
    def in_numpy(self, *arrays: Array) -> Array:
        from_input, from_state, state = arrays
        size = self.hidden_size
        gates = from_input + from_state
        gates[..., size : 2 * size] += 1.0
        new = np.tanh(gates[..., 2 * size : 3 * size])
        _sigmoid_(gates)
        following: Array = np.empty_like(state)
        memory = following[..., size:]
        np.multiply(gates[..., size : 2 * size], state[..., size:], out=memory)
        memory += gates[..., :size] * new
        np.multiply(gates[..., 3 * size :], np.tanh(memory), out=following[..., :size])
        return following


class _GRU(Cell):
    n_gates = 3
    unrolled = staticmethod(torch.gru)

    @override(Cell)
    def in_torch(self, *tensors: Tensor) -> Tensor:
        from_input, from_state, state = tensors
        reset, keep, new = from_input.chunk(3, dim=-1)
        reset_state, keep_state, new_state = from_state.chunk(3, dim=-1)
        kept = torch.sigmoid(keep + keep_state)
        candidate = torch.tanh(new + torch.sigmoid(reset + reset_state) * new_state)
        return candidate + kept * (state - candidate)

    @override(Cell)
    def in_numpy(self, *arrays: Array) -> Array:
        from_input, from_state, state = arrays
        size = 2 * self.hidden_size
        gates = from_input[..., :size] + from_state[..., :size]
        _sigmoid_(gates)
        candidate = np.tanh(from_input[..., size:] + gates[..., : self.hidden_size] * from_state[..., size:])
        following: Array = candidate + gates[..., self.hidden_size :] * (state - candidate)
        return following


# Limits of padding: the largest ratio of padded to actual rows, or the largest number of padded rows per step.
_MOST_PADDED, _MOST_SIDE_BY_SIDE = 4, 32
_CELLS: Mapping[str, type[Cell]] = {"lstm": _LSTM, "gru": _GRU}


def _sigmoid_(array: Array) -> None:
    """Compute the sigmoid in place, by tanh: the exponential would overflow for large arguments."""
    array *= 0.5
    np.tanh(array, out=array)
    array *= 0.5
    array += 0.5


# -- runs ------------------------------------------------------------------------------------------


class Run(ABC):
    """One forward pass of a network with recurrent cells.

    :param states: Initial states, `[n, state_size]` by state key.
    """

    def __init__(self, states: Mapping[str, Tensor]) -> None:
        self.states = dict(states)
        self.final: dict[str, Tensor] = {}
        """Final states by state key; set by a forward pass without gradients."""

    @abstractmethod
    def advance(self, cell: RecurrentCellBlock, inputs: Tensor) -> Tensor:
        """Return the outputs of a cell, `[n_rows, hidden_size]`.

        :param cell: The cell.
        :param inputs: `[n_rows, features]`.
        """


class StepRun(Run):
    """A run in which each row is one step of another episode; states are `[n_rows, state_size]`."""

    @override(Run)
    def advance(self, cell: RecurrentCellBlock, inputs: Tensor) -> Tensor:
        state = cell.step(inputs, self.states[cell.state_key])
        self.final[cell.state_key] = state.detach()
        return state[..., : cell.hidden_size]


class SequenceRun(Run):
    """A run in which rows are the steps of sequences; states are `[n_sequences, state_size]`, before the first steps.

    :param groups: The sequences in groups. Those of a later group continue sequences of an earlier one: the pass, then
        without gradients, sets their states.
    :param states: See :class:`Run`.
    """

    def __init__(self, groups: Sequence[PackedRows], states: Mapping[str, Tensor]) -> None:
        super().__init__(states)
        self._groups = groups

    @override(Run)
    def advance(self, cell: RecurrentCellBlock, inputs: Tensor) -> Tensor:
        states, key = self.states[cell.state_key], cell.state_key
        if torch.is_grad_enabled() and len(self._groups) == 1 and (padded := self._groups[0].padded) is not None:
            group = self._groups[0]
            output, _ = cell.unroll(inputs[padded.rows], padded.batch_sizes, states[group.sequences])
            return output[padded.places]
        final = torch.empty_like(states)
        packed = []
        for group in self._groups:
            if group.follows is not None:
                states[group.sequences] = final[group.follows]
            output, last = cell.unroll(inputs[group.rows], group.batch_sizes, states[group.sequences])
            final[group.sequences] = last.detach()
            packed.append(output)
        self.final[key] = final
        if len(packed) == 1:
            return packed[0][self._groups[0].places]
        rows = torch.cat([group.rows for group in self._groups])
        output = torch.empty_like(packed[0]).new_empty(len(rows), cell.hidden_size)
        output[rows] = torch.cat(packed)
        return output


class _PaddedRows(NamedTuple):
    """Sequences that are padded to the length of the longest; the outputs of padding rows are ignored."""

    rows: Tensor
    """`[n_steps * n_sequences]`"""
    batch_sizes: list[int]
    places: Tensor
    """Index of each row among them, `[n_rows]`."""


class PackedRows:
    """Indices of the rows that are the first steps of some sequences, then the second ones, and so on.

    :param order: All rows, sorted by sequence, `[n_rows]`.
    :param starts: Index of the first row of each sequence in `order`, `[n_sequences]`.
    :param lengths: Number of steps of each sequence, `[n_sequences]`.
    :param device: Device of the indices.
    :param chosen: The sequences of this group; `None`: all of them.
    :param follows: For each of `chosen` the sequence that it continues.
    """

    def __init__(
        self,
        order: Array,
        starts: Array,
        lengths: Array,
        device: str | torch.device,
        chosen: Array | None = None,
        follows: Array | None = None,
    ) -> None:
        chosen = np.arange(len(lengths)) if chosen is None else chosen
        by_length = np.argsort(-lengths[chosen], kind="stable")
        sequences = chosen[by_length]
        ascending = lengths[sequences][::-1]
        n_steps = int(ascending[-1])
        sizes = len(sequences) - np.searchsorted(ascending, np.arange(n_steps), side="right")
        step = np.repeat(np.arange(n_steps), sizes)
        rank = np.arange(len(step)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        rows = order[starts[sequences[rank]] + step]

        def index(array: Array) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

        self.batch_sizes: list[int] = sizes.tolist()
        self.rows = index(rows)
        """`[n_rows of the group]`"""
        self.sequences = index(sequences)
        """`[n_sequences of the group]`, the longest first."""
        self.follows = None if follows is None else index(follows[by_length])
        self.places = index(np.argsort(rows)) if len(rows) == len(order) else self.rows
        """Index of each row among the packed ones, if the group has all rows."""
        self.padded: _PaddedRows | None = None
        """Padded rows, if gradients are faster so: on the CPU, sequences of equal length are about ten times as fast.
        Final states of shorter sequences are not available then."""
        n_padded = n_steps * len(sequences)
        if len(rows) < n_padded <= max(_MOST_PADDED * len(rows), _MOST_SIDE_BY_SIDE * n_steps):
            place = step * len(sequences) + rank
            padded = np.full(n_padded, rows[0])
            padded[place] = rows
            self.padded = _PaddedRows(index(padded), [len(sequences)] * n_steps, index(place[np.argsort(rows)]))


def recurrent_cells(network: nn.Module) -> dict[str, RecurrentCellBlock]:
    """Return the recurrent cells of a network by their state keys.

    :raises ConfigError: Two cells have the same key.
    """
    cells: dict[str, RecurrentCellBlock] = {}
    for module in network.modules():
        if isinstance(module, RecurrentCellBlock):
            if module.state_key in cells:
                raise ConfigError(
                    f"{module.block_name}: the network has another recurrent cell with this output; give each an "
                    "output key of its own."
                )
            cells[module.state_key] = module
    return cells


@contextmanager
def running(cells: Iterable[RecurrentCellBlock], run: Run | None) -> Iterator[None]:
    """Return a context in which cells take their states from a run, and store the final ones in it.

    :param cells: The cells of a network.
    :param run: The run; `None`: nothing changes.
    """
    if run is None:
        yield
        return
    try:
        for cell in cells:
            cell.run = run
        yield
    finally:
        for cell in cells:
            cell.run = None
