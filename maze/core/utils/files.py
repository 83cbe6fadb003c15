"""Atomic writing of files, and checksums that are compared on reading."""

from __future__ import annotations

import csv
import io
import json
import logging
import os
import re
import secrets
import shutil
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from maze.core.errors import CheckpointError

_LOGGER = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".maze-unfinished-"
"""Prefix of files of an incomplete write."""


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Write a file atomically: at any time it has either the old content or the whole new content.

    :param path: The file; its directory must exist.
    :param write: Writes the content into a binary file. If it raises an error, the old file stays.
    """
    target = Path(path)
    temporary = target.parent / f"{TEMPORARY_PREFIX}{target.name}-{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileNotFoundError):  # there is none to replace
            shutil.copymode(target, temporary)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # makes the renaming durable
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_whole(path: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Write text (as UTF-8) or bytes with :func:`atomic_write`."""
    data = content.encode() if isinstance(content, str) else content
    atomic_write(path, lambda file: file.write(data))


def csv_text(rows: Iterable[Iterable[object]], delimiter: str = ",") -> str:
    """Format rows of cells as lines of a CSV table."""
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(rows)
    return text.getvalue()


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table for the console, whose first column is a name.

    :param rows: Cells; the first row is the heading.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if not index else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing, damaged, or holds another type."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def inside_directory(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context in which a directory is the working directory."""
    previous = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(previous)


IN_MEMORY = "<stream>"
"""Name of a content that was not read from a file."""
_CHECKSUM = re.compile(rb"maze-crc32:([0-9a-f]{8})\n")
_CHECKSUM_SIZE = 20
_JSON_CHECKSUM = re.compile(rb', "crc32": "([0-9a-f]{8})"}\s*$')
_ZIP_END, _ZIP_END_SIZE = b"PK\5\6", 22


def write_with_checksum(path: str | os.PathLike[str], content: bytes | memoryview) -> None:
    """Write a pickle or a zip archive with its checksum atomically.

    The checksum follows the end of a pickle, where `pickle.load` ignores it, or is the comment of an archive.

    :param path: The file; its directory must exist.
    :param content: A pickle, or an archive without a comment.
    """
    end = b""
    if bytes(content[-_ZIP_END_SIZE : -_ZIP_END_SIZE + 4]) == _ZIP_END:
        content, end = content[:-2], struct.pack("<H", _CHECKSUM_SIZE)
    end += b"maze-crc32:%08x\n" % zlib.crc32(end, zlib.crc32(content))
    atomic_write(path, lambda file: (file.write(content), file.write(end)))


def verify_checksum(content: bytes | bytearray, name: str) -> memoryview:
    """Compare the checksum of a file with its content, and return that content.

    Files of other programs have no checksum and pass; a warning is logged once.

    :param content: All bytes of the file.
    :param name: Name of the file, for messages.
    :return: The pickle without its checksum, or the whole archive.
    :raises CheckpointError: The checksum does not match.
    """
    view = memoryview(content)
    found = _CHECKSUM.fullmatch(view[-_CHECKSUM_SIZE:])
    if found is None:
        if name != IN_MEMORY:
            _say_unverified()
        return view
    inner = view[:-_CHECKSUM_SIZE]
    if zlib.crc32(inner) != int(found[1], 16):
        raise CheckpointError(f"{name} is damaged: its checksum does not match its content. Use another copy of it.")
    return view if bytes(inner[:2]) == b"PK" else inner


def has_checksum(content: bytes | bytearray) -> bool:
    """Return whether a pickle or an archive ends with a checksum; :func:`verify_checksum` compares it."""
    return _CHECKSUM.fullmatch(memoryview(content)[-_CHECKSUM_SIZE:]) is not None


_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_ENCRYPTED, _FOLDER = 0x1, 0x10
ZIP_ERRORS = (zipfile.BadZipFile, ArithmeticError, EOFError, OSError, RuntimeError, ValueError, struct.error)
"""Errors of :func:`zip_entries`."""


def zip_entries(content: bytes | bytearray) -> dict[str, memoryview]:
    """Return the entries of a zip archive by name, as views of the content.

    :param content: All bytes of an archive without compression.
    :raises ValueError: An entry is compressed, encrypted, a folder, damaged, or has the name of another one; or they
        claim more bytes than the content has. Damaged archives raise any of :data:`ZIP_ERRORS`.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = archive.infolist()
    found: dict[str, memoryview] = {}
    n_left = len(content)
    for entry in entries:
        name, size = f"its part `{entry.filename}`", entry.file_size
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & _ENCRYPTED or entry.external_attr & _FOLDER:
            raise ValueError(f"{name} is compressed or encrypted, or a folder")
        *_, n_name, n_extra = _LOCAL_HEADER.unpack_from(content, entry.header_offset)
        start = entry.header_offset + _LOCAL_HEADER.size + n_name + n_extra
        n_left -= size
        if start + size > len(content) or n_left < 0:
            raise ValueError(f"{name} and those before it claim more bytes than the file has")
        record = memoryview(content)[start : start + size]
        if zlib.crc32(record) != entry.CRC or entry.filename in found:
            raise ValueError(f"the checksum of {name} is wrong, or there are two of them")
        found[entry.filename] = record
    return found


def json_with_checksum(text: bytes) -> bytes:
    """Add the checksum of a JSON object's text as its last entry, `crc32`."""
    return text[:-1] + b', "crc32": "%08x"}' % zlib.crc32(text)


def open_json(text: bytes, name: str) -> bytes:
    """Compare the checksum of :func:`json_with_checksum`, and return the text without it.

    :param text: JSON object, with or without a checksum.
    :param name: Origin of the text, for messages.
    :raises CheckpointError: The checksum does not match.
    """
    found = _JSON_CHECKSUM.search(text)
    if found is None:
        return text
    inner = text[: found.start()] + b"}"
    if zlib.crc32(inner) != int(found[1], 16):
        raise CheckpointError(f"{name} is damaged: its checksum does not match its content.")
    return inner


@cache
def _say_unverified() -> None:
    """Warn once per process."""
    _LOGGER.warning("A file without a checksum, not written by Maze, is read: damage may go unnoticed.")


def clean_stale_temporaries(directory: str | os.PathLike[str], min_age: float = 0.0) -> list[Path]:
    """Remove files of interrupted writes (a killed process).

    :param directory: The directory, without subdirectories.
    :param min_age: Smallest age in seconds; younger files may belong to another process.
    :return: The removed files.
    """
    removed = []
    newest = time.time() - min_age
    for leftover in sorted(Path(directory).glob(f"{TEMPORARY_PREFIX}*")):
        if leftover.stat().st_mtime > newest:
            continue
        leftover.unlink(missing_ok=True)
        removed.append(leftover)
    return removed
