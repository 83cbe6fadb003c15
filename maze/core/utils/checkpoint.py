"""Checkpoints of weights and training states, safe against kills, full disks and flipped bytes.

States are dictionaries of tensors and plain values, written by `torch.save` and readable by `torch.load`. They are
read after a comparison of their checksum, by an interpreter that runs no code of the file.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch

from maze.core.errors import CheckpointError
from maze.core.utils.files import ZIP_ERRORS, verify_checksum, write_with_checksum, zip_entries
from maze.core.utils.pickle_reader import Rule, read_first_pickle, read_pickle, refuse
from maze.core.utils.pickle_rules import plain_rules, torch_rules

_MAX_NAMES_SHOWN = 6


class Stateful(Protocol):
    """An object with a state dictionary: a `TorchModel`, an optimizer, a vector environment, an evaluator.

    For parts of a run, `load_state_dict` may return what could not be resumed: sentences, or by index of the
    environment the reason why it begins a new episode.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Write a state atomically: the file holds either the previous state or the whole new one.

    :param path: The file to write.
    :param state: Tensors, numbers, strings and containers of them.
    :raises CheckpointError: The state could not be written, e.g. because the disk is full.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    try:
        write_with_checksum(path, buffer.getbuffer())
    except OSError as error:
        kept = " The previous file is unchanged." if Path(path).exists() else ""
        raise CheckpointError(f"Could not write the checkpoint `{path}`: {error}.{kept}") from error


def load_state(source: str | Path | BinaryIO, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Read and verify a state written by :func:`save_state` or `torch.save`.

    :param source: A file, by its path or opened for binary reading.
    :param map_location: The device to put tensors on.
    :raises CheckpointError: The file is missing, damaged, or something else than a checkpoint.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        name, content = f"`{path}`", _read(path)
    else:
        name, content = "The opened checkpoint", bytearray(source.read())
    records = _verified_records(content, name)
    try:
        state = read_pickle(records["data.pkl"], _rule, _storage_reader(records, torch.device(map_location)))
    except Exception as error:  # an untrusted content can lead to nearly any type
        limits = "Checkpoints contain tensors and plain values only, and nothing in it is executed"
        raise CheckpointError(f"{name} cannot be loaded as a checkpoint: {_first_line(error)}. {limits}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name} holds a {type(state).__name__}; expected a state dictionary.")
    return state


def load_into(model: Stateful, state: Mapping[str, Any], origin: str | Path = "The checkpoint") -> None:
    """Load weights into a model; the model stays unchanged if they do not fit.

    :param model: The model to load into, such as a :class:`~maze.core.agent.torch_model.TorchModel`, which checks them.
    :param state: Its state dictionary.
    :param origin: Origin of the state, for messages.
    :raises CheckpointError: Names or shapes differ; the message lists them.
    """
    try:
        model.load_state_dict(dict(state))
    except CheckpointError as error:
        origin_name = f"`{origin}`" if isinstance(origin, Path) else origin
        raise CheckpointError(f"{origin_name} does not fit the model, which is unchanged. {error}") from error


def _storage_reader(records: Mapping[str, memoryview], device: torch.device) -> Callable[[Any], torch.Tensor]:
    """Return a function that reads the values of tensors by their references in a checkpoint's pickle.

    :param records: Contents of the archive's entries.
    :param device: Device of the tensors.
    """
    flat: dict[str, torch.Tensor] = {}

    def read(reference: Any) -> torch.Tensor:
        if type(reference) is not tuple or len(reference) != 5 or not isinstance(reference[1], torch.dtype):
            raise refuse("it holds a reference to something else than the values of a tensor")
        _, dtype, key, _, n_values = reference
        if key not in flat:
            flat[key] = _flat_tensor(records[f"data/{key}"], dtype).to(device)
        if flat[key].dtype != dtype or flat[key].numel() != n_values:
            raise refuse("it holds a tensor whose values do not fit its size and type")
        return flat[key]

    return read


def read_storage(content: Any) -> torch.Tensor:
    """Read the values of a pickled tensor: three headers, a reference, the values.

    :param content: The argument of `torch.storage._load_from_bytes`.
    :raises RefusedPickleError: The content has another format.
    :return: The values, `[n_values]`.
    """
    if type(content) is not bytes:
        raise refuse("it holds a tensor without values")
    position, read = 0, []
    for _ in range(5):
        value, n_bytes = read_first_pickle(content[position:], _rule, lambda reference: reference)
        read.append(value)
        position += n_bytes
    (_, dtype, key, _, n_values, *_), keys = read[3:]
    (n_stored,) = struct.unpack_from("<q", content, position)
    found = _flat_tensor(memoryview(bytearray(content[position + 8 :])), dtype)
    if keys != [key] or not found.numel() == n_values == n_stored:
        raise refuse("it holds a tensor whose values do not fit its size and type")
    return found


def _flat_tensor(content: memoryview, dtype: Any) -> torch.Tensor:
    if not isinstance(dtype, torch.dtype) or len(content) % dtype.itemsize:
        raise refuse("it holds a tensor whose values do not fit its type")
    if not len(content):
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(content, dtype=dtype)  # shares the memory of the file, which has no other user
    return flat.clone() if flat.data_ptr() % dtype.itemsize else flat


def _rule(module_name: str, qualified_name: str) -> Rule:
    name = f"{module_name}.{qualified_name}"
    rule = plain_rules().get(name) or torch_rules().get(name)
    if rule is None:
        raise refuse(f"it names `{name}`, which checkpoints do not contain")
    return rule


def _read(path: Path) -> bytearray:
    if path.is_dir():
        raise CheckpointError(f"`{path}` is a directory; expected a checkpoint file.")
    try:
        with path.open("rb", buffering=0) as file:
            content = bytearray(path.stat().st_size)
            del content[file.readinto(content) :]
            return content
    except FileNotFoundError as error:
        raise CheckpointError(f"There is no checkpoint `{path}`. Training writes one.") from error
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror or error}.") from error


def _verified_records(content: bytearray, name: str) -> dict[str, memoryview]:
    """Return the entries of a checkpoint's archive, without their common folder, after comparing checksums."""
    expected = "expected a checkpoint written by torch.save"
    if not content.startswith(b"PK"):
        kind = "an HTML page" if content.lstrip()[:1] == b"<" else f"{len(content)} bytes of something else"
        raise CheckpointError(f"{name} is {kind}; {expected}.")
    verify_checksum(content, name)
    try:
        records = zip_entries(content)
    except ZIP_ERRORS as error:
        raise CheckpointError(f"{name} is damaged or was cut off ({_first_line(error)}); {expected}.") from error
    pickles = [entry for entry in records if entry.endswith("/data.pkl")]
    if len(pickles) != 1:
        held = listing(list(records))
        raise CheckpointError(f"{name} is a zip archive of something else (it holds {held}); {expected}.")
    folder = pickles[0].removesuffix("data.pkl")
    if records.get(f"{folder}byteorder", b"") not in (b"", sys.byteorder.encode()):
        raise CheckpointError(f"{name} was written on a machine with another byte order.")
    return {entry.removeprefix(folder): record for entry, record in records.items()}


def listing(names: Sequence[str], separator: str = ", ") -> str:
    """Join names for a message; those after the sixth are counted only.

    :param names: The names, or descriptions of problems.
    :param separator: Text between two of them.
    """
    hidden = len(names) - _MAX_NAMES_SHOWN
    return separator.join(names[:_MAX_NAMES_SHOWN]) + (f" and {hidden} more" if hidden > 0 else "")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
