"""Parquet files of episodes.

A row is a sub-step. All files of an environment have the same columns, derived from its spaces and event interfaces, so
that many files can be read as one table. Needs pyarrow (extra `parquet`).
"""

from __future__ import annotations

import inspect
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.env.base_env import is_truncated
from maze.core.env.structured_env import StepKeyType
from maze.core.errors import EnvironmentContractError, optional_package
from maze.core.events.event_record import EventRecord
from maze.core.trajectory_recording.records.spaces_record import SpacesRecord
from maze.core.utils.files import atomic_write

if TYPE_CHECKING:
    import pyarrow as pa

_NUMBERS = (int, float, bool, np.number, np.bool_)
_NUMERIC = re.compile(r"(int|float|bool|Any|np\.(?!ndarray)\w+)( \| (int|float|bool|None))*")
"""Annotations of arguments that may be numbers."""
_STORED = {np.dtype(np.float16): np.dtype(np.float32)}
"""Replacements of types that few readers of Parquet support."""


class SubstepRow(NamedTuple):
    """A sub-step to be stored."""

    step: int
    """Number of the environment step in its episode, from 0."""
    substep: int
    """Number of the sub-step in its step, from 0."""
    record: SpacesRecord
    """Actor, observation, action, reward, done and info."""
    events: Sequence[EventRecord] = ()
    """Events of the sub-step."""


@dataclass(frozen=True)
class _Entry:
    """Storage format of the values of an observation or action."""

    dtype: np.dtype[Any] | None
    """Type of its numbers; `None`: it is stored as text or JSON."""
    shape: tuple[int, ...] | None
    """Shape of arrays; `None`: it differs between sub-steps, and lists of variable length are stored."""

    @property
    def size(self) -> int:
        return int(np.prod(self.shape or ()))


class ParquetColumns:
    """The columns of an environment's episodes.

    `episode_id`, `step`, `substep`, `step_key` and `agent_id` identify row and actor (numbers from 0);
    `observation.<entry>` and `action.<entry>` hold a number, or the list of an array's numbers in C order; `reward`,
    `done` and `truncated` are those of the sub-step. `event.<Interface>.<event>` is the number of its events,
    `event.<Interface>.<event>.<argument>` the sum of an argument over them (null: there are none, or it is no number),
    and `events` lists all with their attributes as JSON. `kpi.<name>`, in the last row of an episode, are its key
    performance indicators.

    :param observation_spaces: Observation space of each sub-step.
    :param action_spaces: Action space of each sub-step.
    :param interfaces: The event interfaces of the environment.
    :raises ConfigImportError: pyarrow is missing.
    """

    def __init__(
        self,
        observation_spaces: Mapping[StepKeyType, spaces.Space[Any]],
        action_spaces: Mapping[StepKeyType, spaces.Space[Any]],
        interfaces: Iterable[type[Any]] = (),
    ) -> None:
        optional_package("pyarrow", "parquet", "Parquet files need pyarrow")
        self._entries = {"observation": _entries(observation_spaces), "action": _entries(action_spaces)}
        self._events = dict(event for interface in interfaces for event in _event_columns(interface))

    def write(
        self, path: str | Path, episode_id: str, rows: Sequence[SubstepRow], kpis: Mapping[str, float] | None = None
    ) -> Path:
        """Write an episode atomically.

        :param path: The file; its directory is created if necessary.
        :param episode_id: Identity of the episode.
        :param rows: Its sub-steps, in order.
        :param kpis: Its key performance indicators, if it has ended.
        :raises EnvironmentContractError: An observation or action does not fit its space.
        """
        import pyarrow.parquet as pq

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = io.BytesIO()
        pq.write_table(self._table(episode_id, rows, kpis or {}), content, compression="zstd")
        atomic_write(path, lambda file: file.write(content.getbuffer()))
        return path

    def _table(self, episode_id: str, rows: Sequence[SubstepRow], kpis: Mapping[str, float]) -> pa.Table:
        import pyarrow as pa

        n_rows, records = len(rows), [row.record for row in rows]
        columns: list[tuple[str, pa.Array, Mapping[str, str] | None]] = []

        def add(name: str, values: Any, kind: Any = None, metadata: Mapping[str, str] | None = None) -> None:
            columns.append((name, values if isinstance(values, pa.Array) else pa.array(values, kind), metadata))

        add("episode_id", [str(episode_id)] * n_rows, pa.string())
        add("step", [row.step for row in rows], pa.int32())
        add("substep", [row.substep for row in rows], pa.int16())
        add("step_key", [str(record.substep_key) for record in records], pa.string())
        add("agent_id", [int(record.agent_id) for record in records], pa.int32())
        for field, entries in self._entries.items():
            for key, entry in entries.items():
                values = [(getattr(record, field) or {}).get(key) for record in records]
                metadata = {"shape": json.dumps(entry.shape)} if entry.shape else None
                add(f"{field}.{key}", _column(f"{field} `{key}`", values, entry), metadata=metadata)
        add("reward", [None if record.reward is None else float(record.reward) for record in records], pa.float64())
        add("done", [bool(record.done) for record in records], pa.bool_())
        cut_off = [is_truncated(bool(record.done), record.info or {}) for record in records]
        add("truncated", cut_off, pa.bool_())
        fired = [_by_name(row.events) for row in rows]
        for name, arguments in self._events.items():
            add(f"event.{name}", [len(events.get(name, ())) for events in fired], pa.int32())
            for argument in arguments:
                sums = [_sum(events.get(name, ()), argument) for events in fired]
                add(f"event.{name}.{argument}", sums, pa.float64())
        described = pa.list_(pa.struct([("event", pa.string()), ("attributes", pa.string())]))
        add("events", [[_described(event) for event in row.events] for row in rows], described)
        for name, value in kpis.items():
            add(f"kpi.{name}", [*[None] * (n_rows - 1), float(value)], pa.float64())
        schema = pa.schema([pa.field(name, array.type, metadata=metadata) for name, array, metadata in columns])
        return pa.Table.from_arrays([array for _, array, _ in columns], schema=schema)


def _entries(by_key: Mapping[StepKeyType, spaces.Space[Any]]) -> dict[str, _Entry]:
    """Return the storage formats of entries; entries of several sub-steps share the column of their name."""
    found: dict[str, _Entry] = {}
    for space in by_key.values():
        parts = space.spaces if isinstance(space, spaces.Dict) else {}
        for key, part in parts.items():
            entry = _entry(part)
            found[key] = _joined(found[key], entry) if key in found else entry
    return found


def _entry(space: spaces.Space[Any]) -> _Entry:
    if isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        dtype = np.dtype(space.dtype)
        return _Entry(_STORED.get(dtype, dtype), tuple(space.shape or ()))
    return _Entry(None, ())


def _joined(one: _Entry, other: _Entry) -> _Entry:
    if one.dtype is None or other.dtype is None:
        return _Entry(None, ())
    shape = one.shape if one.shape == other.shape else None
    return _Entry(np.promote_types(one.dtype, other.dtype), shape)


def _column(name: str, values: Sequence[Any], entry: _Entry) -> pa.Array:
    import pyarrow as pa

    if entry.dtype is None:
        return pa.array([None if value is None else _text(value) for value in values], pa.string())
    kind = pa.from_numpy_dtype(entry.dtype)
    try:
        if entry.shape is None:
            flat = [None if value is None else np.asarray(value, entry.dtype).ravel() for value in values]
            return pa.array(flat, pa.list_(kind))
        stacked = np.zeros((len(values), *entry.shape), entry.dtype)
        is_missing = np.array([value is None for value in values], np.bool_)
        for row, value in enumerate(values):
            if value is not None:
                stacked[row] = np.asarray(value).reshape(entry.shape)
    except (TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"The {name} cannot be stored as a column: expected {entry.dtype} of the shape {entry.shape}, as in its "
            f"space ({error}). `maze-run -cn conf_check env=<option>` checks environments."
        ) from error
    if entry.size == 1:
        return pa.array(stacked.reshape(-1), kind, mask=is_missing)
    flat_values = pa.array(stacked.reshape(-1), kind)
    mask = pa.array(is_missing) if is_missing.any() else None
    return pa.FixedSizeListArray.from_arrays(flat_values, entry.size, mask=mask)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a value for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if hasattr(value, "_asdict"):
        return value._asdict()
    return str(value)


def _event_columns(interface: type[Any]) -> list[tuple[str, list[str]]]:
    """Return the events of an interface with their arguments that may be numbers."""
    methods: Mapping[str, Callable[..., Any]] = {
        name: method for name, method in inspect.getmembers(interface, inspect.isfunction) if not name.startswith("_")
    }
    columns = []
    for name, method in methods.items():
        parameters = list(inspect.signature(method).parameters.values())[1:]
        numeric = [parameter.name for parameter in parameters if _may_be_number(parameter)]
        columns.append((f"{interface.__name__}.{name}", numeric))
    return columns


def _may_be_number(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return annotation is inspect.Parameter.empty or _NUMERIC.fullmatch(text) is not None


def _by_name(events: Iterable[EventRecord]) -> dict[str, list[EventRecord]]:
    named: dict[str, list[EventRecord]] = {}
    for event in events:
        named.setdefault(event.qualified_name, []).append(event)
    return named


def _sum(events: Sequence[EventRecord], argument: str) -> float | None:
    values = [event.attributes.get(argument) for event in events]
    if not values or not all(isinstance(value, _NUMBERS) for value in values):
        return None
    return float(sum(values))  # type: ignore[arg-type]  # numbers


def _described(event: EventRecord) -> dict[str, str]:
    return {"event": event.qualified_name, "attributes": json.dumps(event.attributes, default=_plain)}
