"""Networks of a bundle: ONNX graphs run by onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from maze.core.errors import install_command
from maze.serve.archive import BundleError

Array = np.ndarray[Any, Any]

SMALL_NETWORK = 2**22
"""Bytes of a graph below which one thread is as fast as several."""


STATE, NEXT_STATE = "state/", "next_state/"
"""What the names of hidden states in a graph begin with, those before a step and those after it."""


class BundledNetwork:
    """A graph whose inputs are entries of observations and whose outputs are logits.

    The hidden states of a recurrent network are further inputs, and those that follow further outputs.

    :param content: The graph, all of it: it refers to no other file.
    :param description: `inputs` (names in the graph by entry), `outputs` (names in the graph by head), and of recurrent
        networks `states` (sizes by state key).
    :param n_threads: See :class:`~maze.serve.bundle.PolicyBundle`.
    :raises BundleError: onnxruntime is missing, or cannot read the graph.
    """

    def __init__(self, content: bytes, description: Mapping[str, Any], n_threads: int | None = None) -> None:
        refuse_external_data(content)
        try:
            import onnxruntime
        except ImportError as error:
            raise BundleError(f"Acting needs onnxruntime: {install_command('serve')}.") from error
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = n_threads or (1 if len(content) < SMALL_NETWORK else 0)
        options.inter_op_num_threads = 1
        try:
            session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has a type of exception for each kind of fault
            raise BundleError(f"onnxruntime cannot read a network of the bundle: {error}") from error
        self._run = session.run
        self.state_sizes: Mapping[str, int] = {key: int(size) for key, size in description.get("states", {}).items()}
        """Sizes of the hidden states by state key; empty where none are carried."""
        self._inputs = [*description["inputs"].items(), *((key, STATE + key) for key in self.state_sizes)]
        outputs = {**description["outputs"], **{key: NEXT_STATE + key for key in self.state_sizes}}
        self._keys, self._outputs = list(outputs), list(outputs.values())
        shapes = {each.name: each.shape for each in session.get_inputs()}
        missing = {name for _, name in self._inputs} ^ shapes.keys()
        missing |= {STATE + key for key, size in self.state_sizes.items() if shapes.get(STATE + key, ())[1:] != [size]}
        missing |= set(self._outputs) - {each.name for each in session.get_outputs()}
        if missing:
            raise BundleError(f"A network of the bundle and its description do not agree on {sorted(missing)}.")

    def __call__(self, batch: Mapping[str, Array]) -> dict[str, Array]:
        """Logits `[batch, ...]` by head, and the hidden states that follow, `[batch, size]` by state key.

        :param batch: Arrays of float32 `[batch, ...]` by entry, hidden states by state key among them.
        """
        outputs = self._run(self._outputs, {name: batch[entry] for entry, name in self._inputs})
        return dict(zip(self._keys, outputs, strict=True))


# Numbers of fields in onnx.proto: what a message may hold that leads to a tensor.
_TENSOR, _EXTERNAL_DATA, _DATA_LOCATION = "tensor", 13, 14
_MESSAGES: Mapping[str, Mapping[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: _TENSOR, 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: _TENSOR, 6: "graph", 10: _TENSOR, 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: _TENSOR, 2: _TENSOR},
}
_DEEPEST = 64


def refuse_external_data(content: bytes) -> None:
    """Refuses graphs that have onnxruntime read other files.

    :param content: A serialised `ModelProto`.
    :raises BundleError: A tensor lies in another file, or the bytes are no such message.
    """
    try:
        _walk(memoryview(content), "model", 0)
    except (IndexError, ValueError) as error:
        raise BundleError(f"A network of the bundle is no ONNX graph: {error}.") from error


def _walk(message: memoryview, kind: str, depth: int) -> None:
    if depth > _DEEPEST:
        raise ValueError("it is nested too deeply")
    parts = _MESSAGES.get(kind, {})
    for number, value in _fields(message):
        if kind == _TENSOR:
            if number == _EXTERNAL_DATA or (number == _DATA_LOCATION and value != 0):
                raise BundleError(
                    "A network of the bundle refers to another file (external data). Bundles hold all of their numbers "
                    "themselves; nothing was read."
                )
        elif number in parts and isinstance(value, memoryview):
            _walk(value, parts[number], depth + 1)


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """Numbers and values of a protobuf message's fields."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        wire_type = key & 7
        if wire_type == 0:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        if wire_type == 2:
            size, place = _varint(message, place)
        elif wire_type in (1, 5):
            size = 8 if wire_type == 1 else 4
        else:
            raise ValueError(f"it has a field of type {wire_type}")
        if place + size > len(message):
            raise ValueError("it ends too early")
        yield key >> 3, message[place : place + size]
        place += size


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise ValueError("a number is too long")
