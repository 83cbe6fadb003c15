"""`maze-run --new-project <name>`: a project of one's own, to begin with.

It is the example project (`examples/own_project`), with its name replaced.
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
from importlib import metadata, resources
from pathlib import Path

from maze.cli.errors import UsageError
from maze.cli.hydra_setup import environment_configs

FLAG = "--new-project"
USAGE = f"maze-run {FLAG} <name>, for instance {FLAG} stockroom"
TEMPLATE = "stockroom"
"""What the example is called."""
LOCAL = "local.mk"
_NAME = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
_TAKEN_IN_PROJECT = frozenset({"conf", "hydra_plugins", "outputs", "tests"})


def write_project(arguments: Sequence[str]) -> int:
    """Writes the project into a new directory, and says what to do with it.

    :param arguments: What follows `--new-project`: the name, or a path whose last part it is.
    :return: Exit status.
    :raises UsageError: The name cannot be that of a package, or is taken; or there is something in the directory.
    """
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UsageError(f"{FLAG}: expected one name, found {' '.join(arguments) or 'none'}. {USAGE}")
    directory = Path(arguments[0]).absolute()
    _check_place(directory)
    _check_name(directory)
    _write(directory)
    shown = os.path.relpath(directory)
    print(
        f"{directory}: a project with an environment, its tests, a training, a comparison, a gate and a service.\n"
        f"  cd {shown}\n"
        f"  make test    # checks that all of it fits together\n"
        f"  make demo    # trains a policy, compares it, passes it through the gate, and serves it (minutes)\n"
        f"README.md says what is where, and what to change first."
    )
    return 0


def _check_name(directory: Path) -> None:
    name = directory.name
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        usual = re.sub(r"\W+", "_", name.lower(), flags=re.ASCII).strip("_0123456789")
        hint = (
            f" How about {usual}?" if _NAME.fullmatch(usual) and usual != name and not keyword.iskeyword(usual) else ""
        )
        raise UsageError(
            f"{FLAG}: {name!r} cannot be the name of a package: expected small letters, digits and underscores, a "
            f"letter first, and no word of Python's.{hint}"
        )
    if name in sys.stdlib_module_names or name in _TAKEN_IN_PROJECT or _is_installed(directory):
        raise UsageError(f"{FLAG}: {name} is the name of a package already, which it would hide; choose another one.")
    option = next((package for package in (*environment_configs(), "maze.conf") if _has_env(package, name)), None)
    if option is not None:
        raise UsageError(f"{FLAG}: env={name} is an environment of Maze already ({option}); choose another name.")


def _is_installed(directory: Path) -> bool:
    """Whether something of this name can be imported, other than the empty directory itself, or is installed by it."""
    spec = importlib.util.find_spec(directory.name)
    places = () if spec is None else spec.submodule_search_locations or (spec.origin,)
    if any(place is None or Path(place) != directory for place in places):
        return True
    try:
        metadata.distribution(directory.name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _has_env(package: str, name: str) -> bool:
    return (resources.files(package) / "env" / f"{name}.yaml").is_file()


def _check_place(directory: Path) -> None:
    if not directory.parent.is_dir():
        raise UsageError(f"{FLAG}: there is no directory {directory.parent}; make it first.")
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if os.path.lexists(directory):
        what = "a directory with something in it" if directory.is_dir() else "a file"
        raise UsageError(f"{FLAG}: {directory} is {what}, which stays as it is; choose another name or place.")


def _write(directory: Path) -> None:
    """Writes all files, or none."""
    unfinished = directory.with_name(f".{directory.name}-{os.getpid()}")
    try:
        unfinished.mkdir()
        _copy(template_directory(), unfinished, directory.name)
        (unfinished / LOCAL).write_text(
            f"# Of this machine alone, and not kept by git: the Python that Maze is installed for.\n"
            f"PYTHON ?= {sys.executable}\n",
            encoding="utf-8",
        )
        if directory.is_dir():  # empty; somebody may be in it
            for entry in sorted(unfinished.iterdir()):
                entry.rename(directory / entry.name)
        else:
            unfinished.rename(directory)
    except OSError as error:
        raise UsageError(f"{FLAG}: {directory} cannot be written: {error.strerror or error}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def template_directory() -> Path:
    """Where the example is: in the package, as it is installed, or beside it, in a checkout."""
    installed = Path(__file__).parent / "project_template"
    return installed if installed.is_dir() else Path(__file__).resolve().parents[2] / "examples" / "own_project"


def _copy(source: Path, target: Path, name: str) -> None:
    ignored = (template_directory() / ".gitignore").read_text(encoding="utf-8").split()
    for entry in sorted(source.iterdir()):
        if any(fnmatch(entry.name, pattern) for pattern in ignored):
            continue
        copied = target / _renamed(entry.name, name)
        if entry.is_dir():
            _copy(entry, copied, name)
        else:
            copied.parent.mkdir(parents=True, exist_ok=True)  # empty directories are what git has left behind
            copied.write_text(_renamed(entry.read_text(encoding="utf-8"), name), encoding="utf-8")


def _renamed(text: str, name: str) -> str:
    title = "".join(part.capitalize() for part in name.split("_"))
    return text.replace(TEMPLATE, name).replace(TEMPLATE.capitalize(), title)
