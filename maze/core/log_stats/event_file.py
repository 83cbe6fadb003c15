"""TensorBoard event files: writing records, and reading what is left of damaged ones.

Written by the calling thread, so that a full disk is an `OSError` where the writing happens and not a traceback out
of a background thread.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any

_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")
_FLUSH_AT = 1 << 20
_file_numbers = count()


class EventFileWriter:
    """Appends TensorBoard events to a new file, which is created with the first event."""

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._stream: IO[bytes] | None = None
        self._buffer = bytearray()

    def add_summary(self, summary: Any, step: int) -> None:
        """Appends a summary.

        :param summary: A `tensorboard.compat.proto.summary_pb2.Summary`.
        :param step: Number of the log step.
        """
        from tensorboard.compat.proto.event_pb2 import Event

        if self._stream is None:
            self._stream = self._open()
            self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._append(Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        if self._stream is not None:
            pending = memoryview(bytes(self._buffer))
            self._buffer.clear()
            while pending:
                pending = pending[self._stream.write(pending) :]

    def close(self) -> None:
        try:
            self.flush()
        finally:
            stream, self._stream = self._stream, None
            if stream is not None:
                stream.close()

    def _open(self) -> IO[bytes]:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"
        return (self.log_dir / name).open("xb", buffering=0)

    def _append(self, event: Any) -> None:
        data = event.SerializeToString()
        length = _LENGTH.pack(len(data))
        checksums = _masked_crc(length), _masked_crc(data)
        self._buffer += length + _CHECKSUM.pack(checksums[0]) + data + _CHECKSUM.pack(checksums[1])
        if len(self._buffer) > _FLUSH_AT:
            self.flush()


@dataclass
class EventFileContent:
    """The readable records of an event file.

    :param events: The events, `tensorboard.compat.proto.event_pb2.Event`.
    :param n_damaged: Number of places at which records could not be read.
    :param n_lost_bytes: Bytes of the file that hold no readable record.
    """

    events: list[Any]
    n_damaged: int = 0
    n_lost_bytes: int = 0


def read_event_file(file: str | Path) -> EventFileContent:
    """Reads an event file; what is damaged or cut off is skipped and counted."""
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
    """Start, end and content of each intact record; after damage the search goes on at the next plausible header."""
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
