"""Saving and loading weights and training states, so that no kill, full disk or flipped byte goes unnoticed.

States are dictionaries of tensors and plain values, written by ``torch.save``. They are loaded with
``weights_only=True``, which runs no code of the file, after the checksums of its parts have been compared.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from maze.core.errors import CheckpointError
from maze.core.utils.files import atomic_write

_MAX_NAMES_SHOWN = 6


class Stateful(Protocol):
    """Anything with a state dictionary, such as a ``TorchModel`` or a ``torch.nn.Module``."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def save_state(path: str | Path, state: Mapping[str, Any]) -> None:
    """Writes a state; whatever happens, the file holds either the previous state or the whole new one.

    :param path: The file to write.
    :param state: Tensors, numbers, strings and containers of them.
    :raises CheckpointError: The state could not be written, e.g. because the disk is full.
    """
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    try:
        atomic_write(path, lambda file: file.write(buffer.getbuffer()))
    except OSError as error:
        kept = " The previous file is unchanged." if Path(path).exists() else ""
        raise CheckpointError(f"Could not write the checkpoint `{path}`: {error}.{kept}") from error


def load_state(source: str | Path | BinaryIO, map_location: str | torch.device = "cpu") -> dict[str, Any]:
    """Reads and verifies a state written by :func:`save_state` or ``torch.save``.

    :param source: A file, by its path or opened for binary reading.
    :param map_location: The device to put tensors on.
    :raises CheckpointError: The file is missing, damaged, or something else than a checkpoint.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        name, content = f"`{path}`", _read(path)
        alternatives = _alternatives(path)
    else:
        name, content, alternatives = "The opened checkpoint", source.read(), ""
    _verify(content, name, alternatives)
    try:
        state = torch.load(io.BytesIO(content), map_location=map_location, weights_only=True)
    except Exception as error:  # torch and its unpickler raise whatever a foreign content leads to
        raise CheckpointError(
            f"{name} cannot be loaded as a checkpoint: {_first_line(error)} A checkpoint may contain tensors and plain "
            f"values only, and nothing in it is executed.{alternatives}"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{name} holds a {type(state).__name__}; expected a state dictionary.{alternatives}")
    return state


def load_into(model: Stateful, state: Mapping[str, Any], origin: str | Path = "The checkpoint") -> None:
    """Loads weights into a model that they fit; otherwise the model stays as it is.

    :param model: The model to load into.
    :param state: Its state dictionary, possibly nested.
    :param origin: Where the state comes from, for error messages.
    :raises CheckpointError: Names or shapes differ; the message lists them.
    """
    expected = dict(_flatten(model.state_dict()))
    found = dict(_flatten(state))
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing in the checkpoint: {_listing(missing)}")
    if extra := [name for name in found if name not in expected]:
        problems.append(f"unknown to the model: {_listing(extra)}")
    differing = [
        f"{name} (model {_shape(value)}, checkpoint {_shape(found[name])})"
        for name, value in expected.items()
        if name in found and _shape(value) != _shape(found[name])
    ]
    if differing:
        problems.append(f"shapes differ: {_listing(differing)}")
    if problems:
        origin_name = f"`{origin}`" if isinstance(origin, Path) else origin
        raise CheckpointError(
            f"{origin_name} does not fit the model; {'; '.join(problems)}. The model was left unchanged. "
            "Configure the model and environment that the checkpoint was written with, or choose another checkpoint."
        )
    model.load_state_dict(dict(state))


def _read(path: Path) -> bytes:
    if path.is_dir():
        raise CheckpointError(f"`{path}` is a directory; expected a checkpoint file.{_candidates(path, None)}")
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"There is no checkpoint `{path}`.{_alternatives(path)} Training writes one: "
            "`maze-run -cn conf_train env=... algorithm=...`."
        ) from error
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror or error}.{_alternatives(path)}") from error


def _verify(content: bytes, name: str, alternatives: str) -> None:
    """Compares the checksum of every part of the archive that a checkpoint is."""
    expected = "expected a checkpoint written by torch.save"
    if not content:
        raise CheckpointError(f"{name} is empty; {expected}.{alternatives}")
    if not content.startswith(b"PK"):
        kind = "an HTML page" if content.lstrip()[:1] == b"<" else f"{len(content)} bytes of something else"
        raise CheckpointError(f"{name} is {kind}; {expected}.{alternatives}")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = archive.namelist()
            damaged = archive.testzip()
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError, OSError, IndexError) as error:
        raise CheckpointError(
            f"{name} is damaged or was cut off ({_first_line(error)}); {expected}.{alternatives}"
        ) from error
    if damaged is not None:
        raise CheckpointError(f"{name} is damaged: the checksum of its part `{damaged}` is wrong.{alternatives}")
    if not any(entry.endswith("data.pkl") for entry in entries):
        raise CheckpointError(
            f"{name} is a zip archive of something else (it holds {_listing(entries)}); {expected}.{alternatives}"
        )


def _alternatives(path: Path) -> str:
    return _candidates(path.parent, path)


def _candidates(directory: Path, excluded: Path | None) -> str:
    """A sentence on the other checkpoints in a directory, newest first; empty when there are none."""
    if not directory.is_dir():
        return f" The directory `{directory}` does not exist."
    files = [file for file in directory.glob("*.pt") if file != excluded and file.is_file() and file.stat().st_size]
    files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
    return f" Other checkpoints there: {_listing([file.name for file in files])}." if files else ""


def _flatten(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        else:
            yield name, value


def _shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    hidden = len(names) - _MAX_NAMES_SHOWN
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else f"{type(error).__name__}."
