"""Run directories on shared storage: `s3://`, `gs://` and `file://`.

A run works in a local directory. Changed files are uploaded after each checkpoint, each as complete bytes: an object
store publishes an object when its stream is closed, also after an interrupt. Earlier runs are fetched before they are
read.
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
        try:
            from pyarrow.fs import FileSystem
        except ImportError as error:
            raise ConfigError(f"{key}: {url} needs pyarrow: {install_command('storage')}.") from error
        with self._explained("cannot be opened"):
            self._files, self._root = FileSystem.from_uri(url)

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
        """Return the content of a file."""
        path = f"{self._root}/{name}"
        with self._explained("cannot be read"):
            if self._files is None:
                return Path(path).read_bytes()
            with self._files.open_input_file(path) as file:
                content: bytes = file.read()
                return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file atomically."""
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
        logger.warning("%s. The upload is retried after the next checkpoint.", error)


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
