"""`maze-run --new-project <name>`: a new project.

It is a copy of the example project (`examples/own_project`) with another name.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from maze.cli.hydra_setup import UsageError

FLAG = "--new-project"
USAGE = f"maze-run {FLAG} <name>, for instance {FLAG} stockroom"
TEMPLATE = "stockroom"
"""Name of the example project."""
LOCAL = "local.mk"
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_TAKEN_IN_PROJECT = frozenset({"conf", "hydra_plugins", "outputs", "tests"})


def write_project(arguments: Sequence[str]) -> int:
    """Write the project into a new directory, and print the next commands.

    :param arguments: Arguments of `--new-project`: the name, or a path that ends with it.
    :return: Exit status.
    :raises UsageError: The name is not valid for a package, or is in use; or the directory is not empty.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(f"{FLAG}: expected one name, found {' '.join(arguments) or 'none'}. {USAGE}")
    directory = Path(arguments[0]).absolute()
    is_empty = directory.is_dir() and not any(directory.iterdir())
    if not directory.parent.is_dir() or (os.path.lexists(directory) and not is_empty):
        raise UsageError(f"{FLAG}: {directory} must be an empty or a new directory in an existing one.")
    _check_name(directory)
    try:
        _copy(template_directory(), directory)
        (directory / LOCAL).write_text(
            f"# Local to this machine, ignored by git: the Python with Maze.\nPYTHON ?= {sys.executable}\n",
            encoding="utf-8",
        )
    except OSError as error:
        shutil.rmtree(directory, ignore_errors=True)
        raise UsageError(f"{FLAG}: {directory} cannot be written: {error.strerror or error}.") from error
    print(f"{directory}: a new project. README.md describes its files; `make test` runs its tests, `make demo` trains.")
    return 0


def _check_name(directory: Path) -> None:
    name = directory.name
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise UsageError(
            f"{FLAG}: {name!r} cannot be the name of a package: expected lower-case letters, digits and underscores, "
            f"beginning with a letter, and no keyword of Python."
        )
    spec = importlib.util.find_spec(name)
    places = () if spec is None else spec.submodule_search_locations or (spec.origin,)
    if name in _TAKEN_IN_PROJECT or any(place is None or Path(place) != directory for place in places):
        raise UsageError(f"{FLAG}: {name} is the name of an existing package. Choose another name.")


def template_directory() -> Path:
    """Return the directory of the example: in the installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "project_template"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "examples" / "own_project"


def _copy(source: Path, target: Path) -> None:
    ignored = (source / ".gitignore").read_text(encoding="utf-8").split()
    for file in sorted(path for path in source.rglob("*") if path.is_file()):  # git leaves empty directories out
        relative = file.relative_to(source)
        if not any(fnmatch(part, pattern) for part in relative.parts for pattern in ignored):
            copied = target / _renamed(str(relative), target.name)
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text(_renamed(file.read_text(encoding="utf-8"), target.name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    title = "".join(part.capitalize() for part in name.split("_"))
    return text.replace(TEMPLATE, name).replace(TEMPLATE.capitalize(), title)
