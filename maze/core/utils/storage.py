"""Run directories on shared storage: `s3://`, `gs://` and `file://`.

A run works in a local directory. What has changed there is uploaded after each checkpoint, file by file and only as
bytes that are complete: an object store shows an object when it is closed, an interrupted stream included. Earlier
runs are fetched before they are read.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

from maze.core.errors import CheckpointError, ConfigError, install_command
from maze.core.utils.files import TEMPORARY_PREFIX, write_whole

logger = logging.getLogger(__name__)

_URL = re.compile(r"[a-z][a-z0-9+.-]*://")
_LOCAL = "file"
_LARGE = ("trajectory_data", "event_logs", "action_records", "events.out.tfevents.*")
"""What nobody needs who goes on with a run, or acts with its policy."""
_BEGUN = ".hydra"
"""Each run has this directory."""

_uploads: ContextVar[Uploads | None] = ContextVar("maze_uploads", default=None)

_origins: dict[str, str] = {}


def is_url(place: object) -> bool:
    """Whether a directory is named by a URL."""
    return isinstance(place, str) and _URL.match(place) is not None


class Store:
    """A directory that a URL names.

    :param url: `s3://<bucket>/<path>`, `gs://...` or `file:///...`; credentials are those of the environment. What
        follows a `?` are options of `pyarrow.fs`, such as `endpoint_override` and `region`.
    :param key: Where it was configured, for messages.
    :raises ConfigError: There is no such kind of storage, or what it needs is not installed.
    """

    def __init__(self, url: str, key: str) -> None:
        self.url, self._key = url, key
        if urlsplit(url).scheme == _LOCAL:
            self._files, self._root = None, unquote(urlsplit(url).path)
            return
        try:
            from pyarrow.fs import FileSystem
        except ImportError as error:
            raise ConfigError(
                f"{key}: {url} needs pyarrow, which is not installed; it comes with an extra: "
                f"{install_command('storage')}."
            ) from error
        with self._explained("is no place that can be opened"):
            self._files, self._root = FileSystem.from_uri(url)

    def names(self) -> dict[str, tuple[int, int]]:
        """All files below it: size in bytes and time of the last change in nanoseconds, by their relative paths."""
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
        """The content of a file."""
        path = f"{self._root}/{name}"
        with self._explained("cannot be read"):
            if self._files is None:
                return Path(path).read_bytes()
            with self._files.open_input_file(path) as file:
                content: bytes = file.read()
                return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a file, whole or not at all."""
        path = f"{self._root}/{name}"
        with self._explained("cannot be written to"):
            if self._files is None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, content)
                return
            stream = self._files.open_output_stream(path)
            stream.write(content)  # of bytes that are there: nothing of ours can fail in between
            stream.close()

    def has_run(self) -> bool:
        """Whether a run has begun there."""
        return any(name.startswith(f"{_BEGUN}/") for name in self.names())

    def require_free(self) -> None:
        """Raises unless files can be written there, and no run has done so.

        :raises ConfigError: One of the two.
        """
        probe = f".maze-writable-{uuid.uuid4().hex[:8]}"
        self.write(probe, b"")
        with suppress(Exception):  # it does no harm
            Path(f"{self._root}/{probe}").unlink() if self._files is None else self._files.delete_file(
                f"{self._root}/{probe}"
            )
        if self.has_run():
            raise ConfigError(
                f"{self._key}: {self.url} holds an earlier run already. Name another directory; input_dir={self.url} "
                "resume=true goes on with that run."
            )

    def fetch(self, directory: Path) -> None:
        """Copies what belongs to a run's model and training into a local directory, as far as it is not there yet."""
        there = {
            name: state
            for name, state in self.names().items()
            if not any(PurePosixPath(part).match(large) for part in PurePosixPath(name).parts for large in _LARGE)
        }
        if not there:
            raise ConfigError(f"{self._key}: there is no run at {self.url}.")
        directory.mkdir(parents=True, exist_ok=True)
        for path in [path for path in directory.rglob("*") if path.is_file()]:
            is_begun = path.name.startswith(TEMPORARY_PREFIX)  # by another process, that fetches the same
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
    """Uploads what changes in the directory of a run.

    :param directory: The local directory.
    :param store: Where it goes.
    """

    def __init__(self, directory: Path, store: Store) -> None:
        self.directory, self._store = directory, store
        self._known: dict[Path, tuple[int, int]] = {}
        self.n_times = 0
        """How often everything was uploaded."""

    def upload(self) -> None:
        """Uploads what has changed since the last time, oldest changes first.

        :raises ConfigError: Not all could be; the rest is tried again the next time.
        """
        changed = []
        for path in self.directory.rglob("*"):
            with suppress(FileNotFoundError):  # others clean up meanwhile
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
    """A local directory to work in, with what a run has left at a URL, if there is one.

    :param url: The URL.
    :param below: Where such directories are.
    :param key: Where it was configured, for messages.
    :raises ConfigError: It cannot be read, or written to.
    """
    store, directory = Store(url, key), working_directory(url, below)
    if store.has_run():
        store.fetch(directory)
    else:
        store.require_free()
    return Uploads(directory, store)


@contextmanager
def uploaded(uploads: Uploads | None) -> Iterator[None]:
    """Context of a run whose directory is on shared storage: everything is there at its end.

    What a run leaves that has failed before its first checkpoint is not uploaded.

    :param uploads: Where its files are, and where they go; `None`: they stay.
    :raises CheckpointError: Not all of them could be uploaded.
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
    """Uploads what has changed in the run's directory, if that is on shared storage; failures are logged."""
    uploads = _uploads.get()
    if uploads is None:
        return
    try:
        uploads.upload()
    except ConfigError as error:
        logger.warning("%s. It is tried again after the next checkpoint.", error)


def local_copy(place: str, key: str) -> str:
    """A local directory with what is in another place.

    :param place: A directory, which is returned as it is, or the URL of one, which is fetched.
    :param key: Where it was configured, for messages.
    :raises ConfigError: It cannot be read, or there is nothing.
    """
    if not is_url(place):
        return place
    if urlsplit(place).scheme == _LOCAL:
        return unquote(urlsplit(place).path)
    directory = working_directory(place, _cache() / "fetched")
    Store(place, key).fetch(directory)
    _origins[str(directory)] = place
    return str(directory)


def origin_of(directory: str) -> str:
    """The URL that a directory of :func:`local_copy` was fetched from; other directories are what they are."""
    return _origins.get(directory, directory)


def working_directory(url: str, below: Path) -> Path:
    """The local directory that belongs to a URL.

    :param url: The URL.
    :param below: Where such directories are.
    """
    parts = urlsplit(url)
    name = re.sub(r"[^\w.-]+", "-", f"{parts.scheme}-{parts.netloc}{parts.path}").strip("-")
    return below / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maze"


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns
