"""Reader of TensorBoard event files."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maze.core.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd

_LOGGER = logging.getLogger(__name__)
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def tensorboard_to_pandas(file_path: str | Path) -> pd.DataFrame:
    """Return the scalars of an event file as a table with the index `(tag, step)` and the column `value`.

    A damaged or truncated file is read as far as possible. The loss is logged as a warning and stored in
    `attrs["n_damaged"]` (number of damaged positions) and `attrs["n_lost_bytes"]` of the table.

    :param file_path: The event file, or a directory with event files, which are read in the order of their names.
    """
    import pandas as pd

    rows: list[tuple[str, int, float]] = []
    n_damaged = n_lost_bytes = 0
    for file in _event_files(Path(file_path)):
        content = read_event_file(file)
        n_damaged += content.n_damaged
        n_lost_bytes += content.n_lost_bytes
        if content.n_damaged:
            _LOGGER.warning(
                "%s is damaged at %d position(s): %d of %d bytes could not be read; %d events were read.",
                file,
                content.n_damaged,
                content.n_lost_bytes,
                file.stat().st_size,
                len(content.events),
            )
        for event in content.events:
            rows += [(value.tag, event.step, value.simple_value) for value in event.summary.value if _is_scalar(value)]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=["tag", "step", "value"]).set_index(["tag", "step"])
    frame.attrs.update(n_damaged=n_damaged, n_lost_bytes=n_lost_bytes)
    return frame


def _event_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = sorted(path.glob("events.out.tfevents.*"))
    if not files:
        raise ConfigError(
            f"{path} is neither a TensorBoard event file nor a directory with one (`events.out.tfevents.*`). A "
            "training run writes them into its output directory."
        )
    return files


def _is_scalar(value: Any) -> bool:
    return bool(value.WhichOneof("value") == "simple_value")


@dataclass
class EventFileContent:
    """The readable records of an event file.

    :param events: The events, `tensorboard.compat.proto.event_pb2.Event`.
    :param n_damaged: Number of positions at which records could not be read.
    :param n_lost_bytes: Number of bytes without a readable record.
    """

    events: list[Any]
    n_damaged: int = 0
    n_lost_bytes: int = 0


def read_event_file(file: str | Path) -> EventFileContent:
    """Read an event file; damaged or truncated records are skipped and counted."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    data = Path(file).read_bytes()
    content = EventFileContent([])
    end = 0
    for start, record_end, record in _records(data):
        if start > end:
            content.n_damaged += 1
            content.n_lost_bytes += start - end
        end = record_end
        try:
            content.events.append(Event.FromString(record))
        except DecodeError:
            content.n_damaged += 1
            content.n_lost_bytes += record_end - start
    if end < len(data):
        content.n_damaged += 1
        content.n_lost_bytes += len(data) - end
    return content


def _records(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield start, end and content of each intact record; damage is skipped up to the next plausible header."""
    position = 0
    while position + _HEADER.size <= len(data):
        length, length_checksum = _HEADER.unpack_from(data, position)
        body = position + _HEADER.size
        end = body + length + _CHECKSUM.size
        if end > len(data) or _masked_crc(data[position : position + _LENGTH.size]) != length_checksum:
            position += 1
            continue
        record = data[body : body + length]
        if _masked_crc(record) == _CHECKSUM.unpack_from(data, body + length)[0]:
            yield position, end, record
        position = end


def _masked_crc(data: bytes) -> int:
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    return int(masked_crc32c(data))
