"""Files that are written completely or not at all."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

TEMPORARY_PREFIX = ".maze-unfinished-"
"""Marks files of a write that has not been completed."""


def atomic_write(path: str | os.PathLike[str], write: Callable[[BinaryIO], object]) -> None:
    """Writes a file so that at any instant either the old content or the whole new content is there.

    :param path: The file; its directory must exist.
    :param write: Writes the content into the binary file that it is given. If it raises, the old file stays.
    """
    target = Path(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f"{TEMPORARY_PREFIX}{target.name}-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(cast(BinaryIO, file))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _usual_mode(target))
        os.replace(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    _sync_directory(target.parent)


def clean_stale_temporaries(directory: str | os.PathLike[str], min_age: float = 0.0) -> list[Path]:
    """Removes what interrupted writes (a killed process) left behind.

    :param directory: Where to look, not below it.
    :param min_age: Seconds since the last write; leaves the files of another process that is writing just now.
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


def _usual_mode(target: Path) -> int:
    """The mode of the file that is replaced, or that of a newly created file (temporary files are private)."""
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        umask = os.umask(0)
        os.umask(umask)
        return 0o666 & ~umask


def _sync_directory(directory: Path) -> None:
    """Makes the renaming itself durable, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
