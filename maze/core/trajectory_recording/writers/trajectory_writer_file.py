"""Files of episodes: pickles, one for each episode, and Parquet tables.

A row of a table is a sub-step. All tables of an environment have the same columns, derived from its spaces and event
interfaces, so that many files can be read as one table. Tables of other origin can be read as episodes as well. Needs
pyarrow (extra `parquet`).
"""

from __future__ import annotations

import inspect
import io
import json
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from gymnasium import spaces

from maze.core.annotations import override
from maze.core.env.base_env import TRUNCATION_KEY, is_truncated
from maze.core.env.space_values import LEAVES, Cast
from maze.core.env.structured_env import ActorID, StepKeyType
from maze.core.errors import CheckpointError, EnvironmentContractError, optional_package
from maze.core.events.event_record import EventRecord
from maze.core.events.event_topic_factory import event_methods
from maze.core.trajectory_recording.records.spaces_record import PROPENSITY, SpacesRecord
from maze.core.trajectory_recording.records.structured_spaces_record import StructuredSpacesRecord
from maze.core.trajectory_recording.records.trajectory_record import SpacesTrajectoryRecord, StateTrajectoryRecord
from maze.core.trajectory_recording.writers.trajectory_writer import TrajectoryWriter
from maze.core.utils.files import atomic_write, file_stem, write_with_checksum

if TYPE_CHECKING:
    import pyarrow as pa

    from maze.core.env.maze_env import MazeEnv


class TrajectoryWriterFile(TrajectoryWriter):
    """Write `<episode id>.pkl` atomically; `load_trajectory` reads it.

    :param log_dir: Directory of the files; created with the first episode.
    """

    def __init__(self, log_dir: str | Path = Path("./trajectory_data")) -> None:
        self.log_dir = Path(log_dir)

    @override(TrajectoryWriter)
    def write(self, episode_record: StateTrajectoryRecord) -> None:
        try:
            content = pickle.dumps(episode_record, protocol=pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise EnvironmentContractError(
                f"Episode {episode_record.id} cannot be stored: {error}. Maze states, maze actions, event attributes, "
                "serializable components and the renderer of a recorded environment have to be picklable."
            ) from error
        self.log_dir.mkdir(parents=True, exist_ok=True)
        write_with_checksum(self.log_dir / f"{file_stem(episode_record.id)}.pkl", content)


PARQUET_SUFFIX = ".parquet"
_NUMBERS = (int, float, bool, np.number, np.bool_)
_FIELDS = ("observation", "action")
_NEED = "Parquet files need pyarrow"
# Replacements of types that few readers of Parquet support.
_STORED = {np.dtype(np.float16): np.dtype(np.float32)}
_DTYPES = {"agent_id": np.int64, "reward": np.float64, "done": np.bool_, "truncated": np.bool_, PROPENSITY: np.float64}
_CASTS = {name: Cast(np.dtype(dtype), f"`{name}`") for name, dtype in _DTYPES.items()}


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


class ParquetColumns:
    """The columns of an environment's episodes.

    `episode_id`, `step`, `substep`, `step_key` and `agent_id` identify row and actor (numbers from 0);
    `observation.<entry>` and `action.<entry>` hold a number, or the list of an array's numbers in C order; `reward`,
    `done` and `truncated` are those of the sub-step, and `propensity` is the probability (density) of the action under
    the policy that acted, where the recorder knows it. `event.<Interface>.<event>` is the number of its events,
    `event.<Interface>.<event>.<argument>` the sum of an argument over them (null without events or numbers),
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
        optional_package("pyarrow", "parquet", _NEED)
        self._entries = {"observation": _entries(observation_spaces), "action": _entries(action_spaces)}
        self._events = {
            f"{interface.__name__}.{name}": list(inspect.signature(method).parameters)[1:]
            for interface in interfaces
            for name, method in event_methods(interface).items()
        }

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
            for key, parts in entries.items():
                values = [(getattr(record, field) or {}).get(key) for record in records]
                metadata = {"shape": json.dumps(_shape(parts))} if _shape(parts) else None
                add(f"{field}.{key}", _column(f"{field} `{key}`", values, parts), metadata=metadata)
        add("reward", [None if record.reward is None else float(record.reward) for record in records], pa.float64())
        add("done", [bool(record.done) for record in records], pa.bool_())
        cut_off = [is_truncated(bool(record.done), record.info or {}) for record in records]
        add("truncated", cut_off, pa.bool_())
        if any(PROPENSITY in (record.info or {}) for record in records):
            add(PROPENSITY, [_propensity(record.info or {}) for record in records], pa.float64())
        fired: dict[str, list[list[EventRecord]]] = {name: [[] for _ in rows] for name in self._events}
        for index, row in enumerate(rows):
            for event in row.events:
                if event.qualified_name in fired:
                    fired[event.qualified_name][index].append(event)
        for name, arguments in self._events.items():
            add(f"event.{name}", list(map(len, fired[name])), pa.int32())
            for argument in arguments:
                add(f"event.{name}.{argument}", [_sum(events, argument) for events in fired[name]], pa.float64())
        described = pa.list_(pa.struct([("event", pa.string()), ("attributes", pa.string())]))
        add("events", [[_described(event) for event in row.events] for row in rows], described)
        for name, value in kpis.items():
            add(f"kpi.{name}", [*[None] * (n_rows - 1), float(value)], pa.float64())
        schema = pa.schema([pa.field(name, array.type, metadata=metadata) for name, array, metadata in columns])
        return pa.Table.from_arrays([array for _, array, _ in columns], schema=schema)


def read_parquet(path: str | Path, env: MazeEnv[Any] | None = None) -> Iterator[SpacesTrajectoryRecord]:
    """Yield the episodes of a table with the columns of :class:`ParquetColumns`.

    `episode_id`, `step`, `reward`, `observation.<entry>` and `action.<entry>` are required. By default there is one
    actor (`step_key` 0, `agent_id` 0), and episodes without a row that is `done` are truncated. `propensity` is the
    probability (density) of the action under the policy that acted. Empty cells count as missing columns. The steps of
    an episode are 0, 1, 2, ..., as missing rows would change what follows an action.

    :param path: The file.
    :param env: The environment, for shapes of arrays and sub-step keys; `None`: arrays are flat.
    :raises CheckpointError: The file is damaged, a column or a row is missing, a row occurs twice, or a cell has no
        value of its space.
    """
    optional_package("pyarrow", "parquet", _NEED)
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise CheckpointError(f"{path} is not a readable Parquet file ({error}).") from error
    missing = [name for name in ("episode_id", "step", "reward") if name not in table.column_names]
    fields = {kind: [name for name in table.column_names if name.startswith(f"{kind}.")] for kind in _FIELDS}
    missing += [f"{kind}.<entry>" for kind, names in fields.items() if not names]
    if missing:
        raise CheckpointError(f"{path}: expected the columns {missing}, found {table.column_names}.")
    if empty := [name for name in ("episode_id", "step") if table[name].null_count]:
        raise CheckpointError(f"{path}: expected a value in each row of {' and '.join(empty)}, found none.")
    by_text: dict[str, Any] = {}
    spaces_of: dict[str, Mapping[Any, Any]] = {}
    if env is not None:
        by_text = {str(key): key for key in env.action_spaces_dict}
        spaces_of = {"observation": env.observation_spaces_dict, "action": env.action_spaces_dict}
    order = [(name, "ascending") for name in ("episode_id", "step", "substep") if name in table.column_names]
    for name, rows in groupby(table.sort_by(order).to_pylist(), itemgetter("episode_id")):
        episode, step, found, is_over = SpacesTrajectoryRecord(name), None, set[Any](), False
        for cells in rows:
            row = {name: cell for name, cell in cells.items() if cell is not None}  # an empty cell is a missing column
            try:
                record = _record(row, fields, by_text, spaces_of)
                if step != row["step"]:
                    if is_over:
                        hint = "Correct `done`, or give the rows after it an `episode_id` of their own."
                        raise ValueError(f"expected no further step, as step {step} is `done`. {hint}")
                    expected = 0 if step is None else step + 1
                    if row["step"] != expected and "events" not in row:  # wrappers of rollouts may leave out steps
                        hint = "Has another file the rows before? Those after a gap need an `episode_id` of their own."
                        raise ValueError(f"expected step {expected}, as steps count from 0. {hint}")
                    step, found = row["step"], set()
                    episode.append(StructuredSpacesRecord())
                actor = (row.get("substep"), record.actor_id)
                if actor in found:
                    hint = "Remove repeated rows; episodes of several sites need an `episode_id` of their own."
                    raise ValueError(f"expected one row of {tuple(record.actor_id)} in a step, found two. {hint}")
            except (TypeError, ValueError, EnvironmentContractError) as error:
                raise CheckpointError(f"{path}, episode {episode.id}, step {row['step']}: {error}") from error
            found.add(actor)
            is_over = row.get("done", False)
            episode.step_records[-1].append(record)
        yield episode


def _record(row: Mapping[str, Any], fields: Mapping[str, Any], keys: Mapping[str, Any], spaces_of: Any) -> SpacesRecord:
    """Return the record of a row's cells.

    :raises ValueError: A cell of the sub-step's spaces is empty, or has no number.
    :raises EnvironmentContractError: A cell has no value of its space.
    """
    text = str(row.get("step_key", 0))
    key = keys.get(text, int(text) if text.isdecimal() else text)
    values: dict[str, dict[str, Any]] = {}
    for kind, names in fields.items():
        parts = getattr(spaces_of.get(kind, {}).get(key), "spaces", {})
        if empty := [name for name in names if name not in row and name.partition(".")[2] in parts]:
            raise ValueError(f"expected a value of {', '.join(empty)}, found none. Fill it, or omit the episode.")
        cells = {name.partition(".")[2]: row[name] for name in names if name in row}
        values[kind] = {entry: _value(cell, parts.get(entry), f"{kind}.{entry}") for entry, cell in cells.items()}
    found = {name: cast(row[name]).item() for name, cast in _CASTS.items() if name in row}
    truncated = found.get("truncated", False)
    info = {TRUNCATION_KEY: truncated, PROPENSITY: found.get(PROPENSITY, np.nan)}
    actor, done = ActorID(key, found.get("agent_id", 0)), found.get("done", False) or truncated
    return SpacesRecord(actor, values["observation"], values["action"], found.get("reward"), done, info)


def _value(value: Any, part: Any, name: str) -> Any:
    """Return a cell as an array of its space."""
    array = np.asarray(value)
    if not isinstance(part, LEAVES) or array.size != int(np.prod(part.shape or ())):
        return array  # a misfit is reported where spaces are compared
    return Cast(np.dtype(part.dtype), f"`{name}`")(array).reshape(part.shape or ())


def _entries(by_key: Mapping[StepKeyType, spaces.Space[Any]]) -> dict[str, list[spaces.Space[Any]]]:
    """Return the spaces of each entry; entries of several sub-steps share the column of their name."""
    found: dict[str, list[spaces.Space[Any]]] = {}
    for space in by_key.values():
        for key, part in (space.spaces if isinstance(space, spaces.Dict) else {}).items():
            found.setdefault(key, []).append(part)
    return found


def _shape(parts: Sequence[spaces.Space[Any]]) -> tuple[int, ...] | None:
    """Return the common shape of the spaces of an entry; `None`: they have none."""
    shapes = {part.shape for part in parts}
    return shapes.pop() if len(shapes) == 1 else None


def _column(name: str, values: Sequence[Any], parts: Sequence[spaces.Space[Any]]) -> pa.Array:
    """Return the column of an entry: numbers, lists of numbers in C order, or texts where its spaces are not arrays."""
    import pyarrow as pa

    if not all(isinstance(part, LEAVES) for part in parts):
        return pa.array([None if value is None else _text(value) for value in values], pa.string())
    dtype = np.result_type(*(part.dtype for part in parts))
    dtype, shape = _STORED.get(dtype, dtype), _shape(parts)
    try:
        arrays = [None if value is None else np.asarray(value, dtype) for value in values]
        flat = [None if array is None else array.reshape(shape or (-1,)).ravel() for array in arrays]
    except (TypeError, ValueError) as error:
        raise EnvironmentContractError(
            f"The {name} cannot be stored as a column: expected {dtype} of the shape {shape}, as in its space "
            f"({error}). `maze-run -cn conf_check env=<option>` checks environments."
        ) from error
    kind = pa.from_numpy_dtype(dtype)
    if shape is not None and int(np.prod(shape)) == 1:
        return pa.array([None if array is None else array[0] for array in flat], kind)
    return pa.array(flat, pa.list_(kind))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=_plain)


def _plain(value: Any) -> Any:
    """Convert a value for JSON."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return value._asdict() if hasattr(value, "_asdict") else str(value)


def _propensity(info: Mapping[str, Any]) -> float | None:
    value = info.get(PROPENSITY)  # 0 or infinity are the rounded densities of numbers at bounds
    return float(value) if isinstance(value, _NUMBERS) and 0.0 < value < np.inf else None


def _sum(events: Sequence[EventRecord], argument: str) -> float | None:
    values = [event.attributes.get(argument) for event in events]
    if not values or not all(isinstance(value, _NUMBERS) for value in values):
        return None
    return float(sum(values))  # type: ignore[arg-type]  # numbers


def _described(event: EventRecord) -> dict[str, str]:
    return {"event": event.qualified_name, "attributes": json.dumps(event.attributes, default=_plain)}
