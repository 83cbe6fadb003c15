"""Spaces trajectories as columns of a compressed NumPy archive.

The rows of a file are sub-steps. Those with the same fields, shapes and types form a table, and each field of a table
is one array, which is smaller and loads faster than pickled dictionaries. A file holds arrays and a JSON text only:
reading it executes no code.
"""

from __future__ import annotations

import io
import json
import logging
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maze.core.env.structured_env import ActorID
from maze.core.errors import CheckpointError, EnvironmentContractError
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord, to_numpy
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord
from maze.core.utils.files import is_sealed, open_seal, write_sealed

_LOGGER = logging.getLogger(__name__)

COLUMNS_SUFFIX = ".npz"
_FORMAT = "maze spaces columns"
_VERSION = 1
_MANIFEST = "manifest"
_DICT_FIELDS = ("observation", "action", "next_observation", "logits")
_VALUE_FIELDS = ("reward", "done", "discounted_return")
_PLAIN_TYPES = (bool, int, float)
_MAX_EMPTY_STEPS = 100_000
_MAX_UNPACKED, _MAX_UNPACKED_PER_BYTE = 256 << 20, 100


class _Column(NamedTuple):
    """Description of a column.

    :param field: Field of the spaces record.
    :param key: Entry of a dictionary field.
    :param dtype: Type of its elements.
    :param shape: Shape of one row.
    :param is_plain: Whether the values were Python's own numbers.
    """

    field: str
    key: str | None
    dtype: str
    shape: tuple[int, ...]
    is_plain: bool


@dataclass
class _Table:
    """Sub-steps with the same columns."""

    step_key: str | int
    batch_shape: tuple[int, ...] | None
    columns: tuple[_Column, ...]
    values: list[list[np.ndarray]] = field(default_factory=list)
    places: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Trajectory, step, position within the step and agent of each row."""
    infos: dict[int, Any] = field(default_factory=dict)
    """Non-empty infos by row."""


def write_spaces_columns(path: str | Path, trajectories: Sequence[SpacesTrajectoryRecord]) -> Path:
    """Write trajectories atomically into one file.

    Observations, actions, next observations, logits, rewards, done flags, discounted returns and actors are stored
    exactly, tensors as arrays. Entries of `info` are stored as JSON if possible; event logs and statistics are not.

    :param path: The file; it gets the suffix `.npz` if it has none.
    :param trajectories: The trajectories.
    """
    path = Path(path)
    path = path if path.suffix == COLUMNS_SUFFIX else path.with_name(path.name + COLUMNS_SUFFIX)
    tables: dict[Any, _Table] = {}
    n_lost = 0
    for t, trajectory in enumerate(trajectories):
        for s, step in enumerate(trajectory.step_records):
            for position, record in enumerate(step.substep_records):
                n_lost += _add_row(tables, record, (t, s, position, int(record.actor_id.agent_id)))
    arrays: dict[str, np.ndarray] = {}
    manifest = {
        "format": _FORMAT,
        "version": _VERSION,
        "ids": [
            trajectory.id if isinstance(trajectory.id, (str, int)) else str(trajectory.id)
            for trajectory in trajectories
        ],
        "lengths": [len(trajectory) for trajectory in trajectories],
        "tables": [_describe(index, table, arrays) for index, table in enumerate(tables.values())],
    }
    arrays[_MANIFEST] = np.frombuffer(json.dumps(manifest).encode(), dtype=np.uint8)
    if n_lost:
        _LOGGER.warning("%s: %d entries of `info` cannot be written as JSON and were left out.", path, n_lost)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    write_sealed(path, content.getbuffer())
    return path


def read_spaces_columns(path: str | Path) -> list[SpacesTrajectoryRecord]:
    """Read trajectories; their arrays are views on the columns.

    :param path: A file written by :func:`write_spaces_columns`.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        open_seal(content, str(path))
        arrays = _arrays(content)
        manifest = json.loads(arrays.pop(_MANIFEST).tobytes().decode())
        if manifest["format"] != _FORMAT or manifest["version"] > _VERSION:
            raise CheckpointError(
                f"{path}: holds {manifest['format']!r}, version {manifest.get('version')}; this release reads "
                f"{_FORMAT!r} up to version {_VERSION}."
            )
        known = {*_DICT_FIELDS, *_VALUE_FIELDS}
        if not all(name in known for table in manifest["tables"] for name, _, _ in table["columns"]):
            raise ValueError("it has columns of unknown fields")
        return _trajectories(arrays, manifest)
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error}).") from error
    except Exception as error:  # damaged archives raise various types
        raise CheckpointError(
            f"{path}: expected a file of `write_spaces_columns`; it is damaged, incomplete or of another kind "
            f"({type(error).__name__}: {error})."
        ) from error


def _trajectories(arrays: dict[str, np.ndarray], manifest: dict[str, Any]) -> list[SpacesTrajectoryRecord]:
    trajectories = [SpacesTrajectoryRecord(id_) for id_ in manifest["ids"]]
    rows = [row for index, table in enumerate(manifest["tables"]) for row in _rows(index, table, arrays)]
    if not sum(manifest["lengths"]) <= len(rows) + _MAX_EMPTY_STEPS:
        raise ValueError(f"{sum(manifest['lengths'])} steps of {len(rows)} sub-steps")
    for trajectory, length in zip(trajectories, manifest["lengths"], strict=True):
        trajectory.step_records = [StructuredSpacesRecord([]) for _ in range(length)]
    rows.sort(key=lambda row: row[0])
    for (t, s, _), record in rows:
        trajectories[t].step_records[s].append(record)
    return trajectories


def _add_row(tables: dict[Any, _Table], record: SpacesRecord, place: tuple[int, int, int, int]) -> int:
    """Add a sub-step to the table of its kind; return the number of lost entries of its info."""
    columns, values = [], []
    for name, key, value in _fields(record):
        array = np.asarray(to_numpy(value))
        if array.dtype.hasobject:
            raise EnvironmentContractError(
                f"`{name}` of {record.actor_id}{'' if key is None else f', key {key!r}'} is no numeric array "
                f"({type(value).__name__}) and cannot be written as a column."
            )
        columns.append(_Column(name, key, array.dtype.str, array.shape, type(value) in _PLAIN_TYPES))
        values.append(array)
    batch_shape = None if record.batch_shape is None else tuple(record.batch_shape)
    step_key = record.actor_id.step_key
    kind = (type(step_key), step_key, batch_shape, tuple(columns))
    table = tables.setdefault(kind, _Table(step_key, batch_shape, tuple(columns)))
    info, n_lost = _as_json(record.info)
    if info is not None:
        table.infos[len(table.values)] = info
    table.values.append(values)
    table.places.append(place)
    return n_lost


def _fields(record: SpacesRecord) -> Iterator[tuple[str, str | None, Any]]:
    for name in _DICT_FIELDS:
        for key, value in (getattr(record, name) or {}).items():
            yield name, key, value
    for name in _VALUE_FIELDS:
        value = getattr(record, name)
        if value is not None:
            yield name, None, value


def _describe(index: int, table: _Table, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Stack the columns of a table into `arrays` and describes them."""
    arrays[f"{index}.places"] = np.asarray(table.places, dtype=np.int64)
    for number, values in enumerate(zip(*table.values, strict=True)):
        arrays[f"{index}.{number}"] = np.stack(values)
    return {
        "step_key": table.step_key,
        "batch_shape": table.batch_shape,
        "columns": [[column.field, column.key, column.is_plain] for column in table.columns],
        "infos": {str(row): info for row, info in table.infos.items()},
    }


def _rows(
    index: int, table: dict[str, Any], arrays: dict[str, np.ndarray]
) -> Iterator[tuple[tuple[int, int, int], SpacesRecord]]:
    batch_shape, infos = table["batch_shape"], table["infos"]
    keys: dict[str, list[str]] = {}
    columns: dict[str, list[list[Any]]] = {}
    for number, (name, key, is_plain) in enumerate(table["columns"]):
        array = arrays[f"{index}.{number}"]
        columns.setdefault(name, []).append(array.tolist() if is_plain else list(array))
        keys.setdefault(name, []).append(key)
    by_field = {
        name: [dict(zip(keys[name], row, strict=True)) for row in zip(*values, strict=True)]
        if name in _DICT_FIELDS
        else values[0]
        for name, values in columns.items()
    }
    actors: dict[int, ActorID] = {}
    for row, (t, s, position, agent_id) in enumerate(arrays[f"{index}.places"].tolist()):
        actor = actors.get(agent_id)
        if actor is None:
            actor = actors[agent_id] = ActorID(table["step_key"], agent_id)
        record = SpacesRecord(actor, batch_shape=batch_shape and list(batch_shape))
        record.info = infos.get(str(row), {}) if infos else {}
        for name, values in by_field.items():
            setattr(record, name, values[row])
        yield (t, s, position), record


def _as_json(info: Any) -> tuple[Any, int]:
    """Return the JSON-compatible entries of an info (`None`: there are none), and the number of others."""
    if not info:
        return None, 0
    if not isinstance(info, dict):
        info, is_entry_of = {"": info}, False
    else:
        is_entry_of = True
    kept = {}
    for key, value in info.items():
        try:
            kept[key] = json.loads(json.dumps(value, default=_plain))
        except (TypeError, ValueError):  # noqa: PERF203 - entries fail one by one
            continue
    n_lost = len(info) - len(kept)
    if not is_entry_of:
        return kept.get(""), n_lost
    return kept or None, n_lost


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(type(value).__name__)


def _arrays(content: bytes) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        if archive.comment and not is_sealed(content):
            raise ValueError("its checksum is damaged")
        n_bytes = sum(entry.file_size for entry in archive.infolist())
    if n_bytes > _MAX_UNPACKED + _MAX_UNPACKED_PER_BYTE * len(content):
        raise ValueError(f"its {len(content)} bytes would unpack to {n_bytes}")
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}
