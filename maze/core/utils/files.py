"""Files: atomic writing, checksums that are compared on reading, run directories on `s3://`, `gs://` and `file://`.

A run works in a local directory. Changed files are uploaded after each checkpoint, each as complete bytes: an object
store publishes an object when its stream is closed, also after an interrupt. Earlier runs are fetched before they are
read.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import os
import re
import secrets
import shutil
import struct
import time
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from maze.core.errors import CheckpointError, ConfigError, optional_package

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
    except BaseException as error:
        with suppress(OSError):  # of the same cause
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(target)) from error  # not the name of the temporary file
        raise
    if os.name == "posix":  # makes the renaming durable
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def write_whole(path: str | os.PathLike[str], content: str | bytes | memoryview) -> None:
    """Write a whole file with :func:`atomic_write`.

    :param path: The file, which is replaced if it exists; its directory must exist.
    :param content: Text, which is written as UTF-8, or bytes.
    :raises OSError: It cannot be written; an earlier file is unchanged.
    """
    data = content.encode() if isinstance(content, str) else content
    atomic_write(path, lambda file: file.write(data))


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Format rows of cells as lines of a CSV table."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
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


def file_stem(identity: object) -> str:
    """Return an identity, such as that of an episode, as the name of a file without its ending.

    :param identity: An object. Characters of its text other than letters, digits and `_.@=+-` become `_`, so different
        identities may get the same name.
    """
    return re.sub(r"[^\w.@=+-]", "_", str(identity))


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a JSON object; empty if the file is missing, damaged, or holds another type."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


@contextmanager
def inside_directory(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context in which a directory is the working directory, for all threads of the process.

    :param directory: The directory.
    :raises OSError: There is no such directory.
    """
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
    """Add the checksum of a JSON object's text as its last entry, `crc32`.

    :param text: The object, with at least one entry, and nothing after its closing brace.
    """
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


_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_LOCAL = "file"
# Files that resuming a run, or acting with its policy, does not need.
_LARGE = ("trajectory_data", "event_logs", "action_records", "events.out.tfevents.*")
_BEGUN = ".hydra"  # directory that each run has

_uploads: ContextVar[Uploads | None] = ContextVar("maze_uploads", default=None)

_origins: dict[str, str] = {}


def is_url(place: object) -> bool:
    """Return whether a directory is a URL."""
    return isinstance(place, str) and _URL.match(place) is not None


class Store:
    """A directory on shared storage.

    :param url: `s3://<bucket>/<path>`, `gs://...` or `file:///...`; credentials are those of the environment. Options
        of `pyarrow.fs`, such as `endpoint_override` and `region`, follow a `?`.
    :param key: Key of the configuration, for messages.
    :raises ConfigError: The kind of storage is unknown, or a package is not installed.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url, key
        if urlsplit(url).scheme == _LOCAL:
            self._files, self._root = None, unquote(urlsplit(url).path)
            return
        storage = optional_package("pyarrow.fs", "storage", f"{key}: {url} needs pyarrow")
        with self._explained("cannot be opened"):
            self._files, self._root = storage.FileSystem.from_uri(url)

    def names(self) -> dict[str, tuple[int, int]]:
        """Return size in bytes and modification time in nanoseconds of all files, by relative path."""
        if self._files is None:
            root = Path(self._root)
            found = [path for path in root.rglob("*") if path.is_file()]
            return {path.relative_to(root).as_posix(): _state(path) for path in found}
        from pyarrow.fs import FileSelector, FileType

        with self._explained("cannot be read"):
            infos = self._files.get_file_info(FileSelector(self._root, allow_not_found=True, recursive=True))
        return {
            str(PurePosixPath(info.path).relative_to(self._root)): (info.size, info.mtime_ns or 0)
            for info in infos
            if info.type == FileType.File
        }

    def read(self, name: str) -> bytes:
        """Return the content of a file.

        :param name: Path relative to the directory.
        :raises ConfigError: The file cannot be read.
        """
        path = f"{self._root}/{name}"
        with self._explained("cannot be read"):
            if self._files is None:
                return Path(path).read_bytes()
            with self._files.open_input_file(path) as file:
                content: bytes = file.read()
                return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically.

        :param name: Path relative to the directory; missing parents are created.
        :param content: The content.
        :raises ConfigError: The file cannot be written.
        """
        path = f"{self._root}/{name}"
        with self._explained("cannot be written to"):
            if self._files is None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
                return
            stream = self._files.open_output_stream(path)
            stream.write(content)  # complete bytes: no error of ours can interrupt the stream
            stream.close()

    def has_run(self) -> bool:
        """Return whether the directory holds a run."""
        return any(name.startswith(f"{_BEGUN}/") for name in self.names())

    def require_free(self) -> None:
        """Check that the directory is writable and holds no run.

        :raises ConfigError: It is not, or it does.
        """
        probe = f".maze-writable-{uuid.uuid4().hex[:8]}"
        self.write(probe, b"")
        with suppress(Exception):  # a remaining file is harmless
            Path(f"{self._root}/{probe}").unlink() if self._files is None else self._files.delete_file(
                f"{self._root}/{probe}"
            )
        if self.has_run():
            resuming = f"input_dir={self.url} resume=true resumes it"
            raise ConfigError(f"{self._key}: {self.url} holds an earlier run. Set another directory; {resuming}.")

    def fetch(self, directory: Path) -> None:
        """Copy the missing and changed files of a run's model and training into a local directory."""
        there = {
            name: state
            for name, state in self.names().items()
            if not any(PurePosixPath(part).match(large) for part in PurePosixPath(name).parts for large in _LARGE)
        }
        if not there:
            raise ConfigError(f"{self._key}: there is no run at {self.url}.")
        directory.mkdir(parents=True, exist_ok=True)
        for path in [path for path in directory.rglob("*") if path.is_file()]:
            is_begun = path.name.startswith(TEMPORARY_PREFIX)  # of another process that fetches the same run
            if not is_begun and path.relative_to(directory).as_posix() not in there:
                path.unlink(missing_ok=True)
        for name, (size, changed) in there.items():
            path = directory / name
            if path.is_file() and _state(path)[0] == size and _state(path)[1] >= changed:
                continue
            content = self.read(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"{self._key}: {self.url} {what}: {reason}") from error


class Uploads:
    """Uploads of changed files of a run directory.

    :param directory: The local directory.
    :param store: The shared storage.
    """

    def __init__(self, directory: Path, store: Store) -> None:
        self.directory, self._store = directory, store
        self._known: dict[Path, tuple[int, int]] = {}
        self.n_times = 0
        """Number of complete uploads."""

    def upload(self) -> None:
        """Upload changed files, oldest changes first.

        :raises ConfigError: An upload failed; the next call retries it.
        """
        changed = []
        for path in self.directory.rglob("*"):
            with suppress(FileNotFoundError):  # other processes may remove files
                if path.is_file() and not path.name.startswith(TEMPORARY_PREFIX):
                    state = _state(path)
                    if self._known.get(path) != state:
                        changed.append((state[1], path, state))
        for _, path, state in sorted(changed):
            with suppress(FileNotFoundError):
                content = path.read_bytes()
                self._store.write(path.relative_to(self.directory).as_posix(), content)
                self._known[path] = state
        self.n_times += 1


def working_copy(url: str, below: Path, key: str) -> Uploads:
    """Return the uploads of a local working directory, with the files of a run at a URL, if there is one.

    :param url: The URL.
    :param below: Parent of working directories.
    :param key: Key of the configuration, for messages.
    :raises ConfigError: The URL cannot be read or written to.
    """
    store, directory = Store(url, key), working_directory(url, below)
    if store.has_run():
        store.fetch(directory)
    else:
        store.require_free()
    return Uploads(directory, store)


@contextmanager
def uploaded(uploads: Uploads | None) -> Iterator[None]:
    """Return a context of a run on shared storage, which uploads all files at its end.

    Files of a run that failed before its first checkpoint are not uploaded.

    :param uploads: The uploads; `None`: the run is local.
    :raises CheckpointError: An upload failed.
    """
    if uploads is None:
        yield
        return
    token = _uploads.set(uploads)
    try:
        yield
    except BaseException:
        if uploads.n_times:
            upload_changes()
        raise
    finally:
        _uploads.reset(token)
    try:
        uploads.upload()
    except ConfigError as error:
        raise CheckpointError(f"{error}. The run is complete in {uploads.directory}; copy it from there.") from error


def upload_changes() -> None:
    """Upload changed files of the run directory, if it is on shared storage; failures are logged."""
    uploads = _uploads.get()
    if uploads is None:
        return
    try:
        uploads.upload()
    except ConfigError as error:
        _LOGGER.warning("%s. The upload is retried after the next checkpoint.", error)


def local_copy(place: str, key: str) -> str:
    """Return a local directory with the files of a directory or URL.

    :param place: A directory, which is returned unchanged, or a URL, which is fetched.
    :param key: Key of the configuration, for messages.
    :raises ConfigError: It cannot be read, or there is no run.
    """
    if not is_url(place):
        return place
    if urlsplit(place).scheme == _LOCAL:
        return unquote(urlsplit(place).path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maze"
    directory = working_directory(place, cache / "fetched")
    Store(place, key).fetch(directory)
    _origins[str(directory)] = place
    return str(directory)


def origin_of(directory: str) -> str:
    """Return the URL of a directory of :func:`local_copy`; other directories are returned unchanged."""
    return _origins.get(directory, directory)


def working_directory(url: str, below: Path) -> Path:
    """Return the local directory of a URL.

    :param url: The URL.
    :param below: Parent of such directories.
    """
    parts = urlsplit(url)
    name = re.sub(r"[^\w.-]+", "-", f"{parts.scheme}-{parts.netloc}{parts.path}").strip("-")
    return below / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
