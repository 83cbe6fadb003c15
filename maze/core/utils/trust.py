"""Packages that the user trusts: named by a command, or remembered for the directory that the user works in."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from maze.core.utils.files import read_json_object, write_whole

_NAMED: ContextVar[tuple[str, ...]] = ContextVar("maze_trusted_packages", default=())


@contextmanager
def trusting(packages: Sequence[str]) -> Iterator[None]:
    """Context in which stored configurations may name classes and functions of packages.

    :param packages: The packages.
    """
    token = _NAMED.set((*_NAMED.get(), *packages))
    try:
        yield
    finally:
        _NAMED.reset(token)


def trusted_here() -> tuple[str, ...]:
    """Packages that are trusted in this context, or remembered for the working directory."""
    return (*_NAMED.get(), *remembered(Path.cwd()))


def remembered(directory: Path) -> tuple[str, ...]:
    """Packages that are remembered for a directory.

    They are written down in the user's own configuration, never in the directory: a file there could be a stranger's.

    :param directory: The directory that the user works in.
    """
    packages = read_json_object(memory_file()).get(str(directory.resolve()))
    return tuple(str(package) for package in packages) if isinstance(packages, list) else ()


def remember(directory: Path, packages: Sequence[str]) -> Path:
    """Has packages trusted whenever the user works in a directory.

    :param directory: The directory.
    :param packages: The packages, beside those that are remembered.
    :return: The file that they are written down in.
    """
    file = memory_file()
    known = {**read_json_object(file), str(directory.resolve()): sorted({*remembered(directory), *packages})}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(known, indent=2) + "\n")
    return file


def memory_file() -> Path:
    """The file that remembers trusted packages by directory."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "maze" / "trusted.json"
