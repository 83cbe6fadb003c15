"""Import guard: only known packages can be imported while a stored configuration is built.

The second line of defence after :mod:`maze.core.utils.stored_config`, independent of the spelling of texts: a finder
before all others checks every import.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from maze.core.errors import CheckpointError

_DISTRIBUTION = "maze-rl"
OWN_PACKAGES = frozenset({"hydra_plugins", "maze", "maze_envs"})
# Package of the tutorial, an example of a user's package: it may be imported, and trusted as a whole.
_TUTORIAL = "tutorial_maze_env"
_FOR_DEVELOPERS = ("all", "dev", "dev-all", "docs")  # extras of Maze that runs do not need
NEVER_WHOLE = frozenset(
    {*OWN_PACKAGES, "builtins", "gymnasium", "hydra", "numpy", "omegaconf", "torch", *sys.stdlib_module_names}
)
"""Packages that are never trusted as a whole, because their functions can do anything."""
# Modules of the standard library with side effects on import.
_ACT_WHEN_IMPORTED = frozenset({"__hello__", "__phello__", "antigravity", "idlelib", "this", "turtledemo"})
_ROOT = Path(__file__).resolve().parents[3]
_REQUIREMENT = re.compile(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?")
_OF_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)")


class ForeignModuleError(CheckpointError, ModuleNotFoundError):
    """A stored configuration causes the import of an unknown module; also an import error."""


class ImportGuard:
    """Allow imports of Maze, its declared dependencies, the standard library and trusted packages.

    Imports by other code are allowed: it is the user's code, which runs already. The guard is active in the context
    (thread, task) that enters it, and in the environments that are made there. It can be sent to other processes.

    :param project: Working directory of the user; no library is imported from there.
    """

    def __init__(self, project: Path | None = None) -> None:
        self._texts: list[tuple[str, str]] = []
        self._directories = {(project or Path.cwd()).resolve()}
        self._trusted: set[str] = set()

    def watch(self, directory: Path, texts: Iterable[tuple[str, Any]], trusted_packages: Iterable[str]) -> None:
        """Guard the construction of a configuration.

        :param directory: The run directory; no library is imported from there.
        :param texts: Keys and values of the configuration.
        :param trusted_packages: Further packages that may be imported.
        """
        self._directories.add(directory.resolve())
        self._texts += [(key, text) for key, text in texts if isinstance(text, str)]
        self._trusted.update(package for package in trusted_packages if package not in NEVER_WHOLE)

    @contextmanager
    def active(self) -> Iterator[ImportGuard]:
        """Return a context in which the guard is active.

        :raises ForeignModuleError: A required import was refused.
        """
        if not sys.meta_path or sys.meta_path[0] is not _FINDER:
            sys.meta_path[:] = [_FINDER, *(finder for finder in sys.meta_path if finder is not _FINDER)]
        token = _ACTIVE.set(self)
        try:
            yield self
        except CheckpointError:
            raise
        except Exception as error:
            if (refused := _cause(error)) is not None:
                raise ForeignModuleError(str(refused), name=refused.name) from error
            raise
        finally:
            _ACTIVE.reset(token)

    def spec_of(self, name: str, is_submodule: bool) -> ModuleSpec | None:
        """Return the spec of a module; `None`: Python's default.

        :param name: Full name of the module.
        :param is_submodule: Whether it belongs to a package that is imported already.
        :raises ForeignModuleError: The module may not be imported.
        """
        package = name.partition(".")[0]
        if not self._texts or package in self._trusted or not _is_import_of_library(name, self._trusted):
            return None  # no stored configuration has been read, or it is the user's code
        if package in _ACT_WHEN_IMPORTED or not _is_library(package):
            raise self._refusal(name, f"{package!r} belongs neither to Maze nor to its dependencies")
        if is_submodule or package in sys.builtin_module_names:
            return None
        guarded = {Path.cwd(), *self._directories} - {_ROOT}  # no library is imported from there
        near = [place for place in sys.path if Path(place).resolve() in guarded]
        if not near:
            return None
        spec = PathFinder.find_spec(name, [place for place in sys.path if place not in near])
        if spec is None and PathFinder.find_spec(name, near) is not None:
            raise self._refusal(name, "it is in the working directory, and not an installed library")
        return spec

    def _refusal(self, name: str, reason: str) -> ForeignModuleError:
        parts = name.split(".")
        for depth in range(len(parts), 0, -1):
            named = re.compile(rf"(?<![\w.]){re.escape('.'.join(parts[:depth]))}(?!\w)")
            if found := next(((key, text) for key, text in self._texts if named.search(text)), None):
                where = f"{found[0]}: {found[1]!r} would import the module {name!r}"
                break
        else:
            where = f"A stored configuration would import the module {name!r}"
        return ForeignModuleError(f"{where}: {reason}.{trust_hint(parts[0])}", name=name)


def trust_hint(package: str) -> str:
    """Explain how to trust a package; empty for those that are never trusted as a whole."""
    if package in NEVER_WHOLE or not package.isidentifier():
        return ""
    return f" If you trust it: --trust {package} on the command line, trusted_packages=[{package!r}] in Python."


def current_guard() -> ImportGuard | None:
    """Return the guard of this context."""
    return _ACTIVE.get()


def imports_guarded(guard: ImportGuard | None = None) -> AbstractContextManager[ImportGuard]:
    """Return a context with an import guard, for stored configurations that are read before or in it.

    :param guard: The guard; `None`: the one of the surrounding context, or a new one.
    """
    return (guard or current_guard() or ImportGuard()).active()


class _GuardingFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        guard = _ACTIVE.get()
        return None if guard is None else guard.spec_of(fullname, path is not None)


_ACTIVE: ContextVar[ImportGuard | None] = ContextVar("maze_import_guard", default=None)
_FINDER = _GuardingFinder()


def _cause(error: BaseException | None) -> ForeignModuleError | None:
    while error is not None and not isinstance(error, ForeignModuleError):
        error = error.__cause__ or error.__context__
    return error


def _is_import_of_library(name: str, trusted: set[str]) -> bool:
    """Return whether a library (or Maze) imports a module, not the user's code.

    The standard library imports for its callers. `importlib.util.find_spec` only looks for the module.
    """
    frame: FrameType | None = inspect.currentframe()
    for _ in range(3):  # this function, the guard and the finder
        frame = frame and frame.f_back
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        if module == "importlib.util" and frame.f_locals.get("fullname") == name:
            return False
        package = str(module).partition(".")[0]
        if package and package not in sys.stdlib_module_names:
            return package not in trusted and _is_library(package)
        frame = frame.f_back
    return True


def _is_library(package: str) -> bool:
    # `sysconfig` imports a module whose name depends on the platform, and which `stdlib_module_names` leaves out.
    if package.startswith("_sysconfigdata_") and (Path(os.__file__).parent / f"{package}.py").is_file():
        return True
    known = package in sys.stdlib_module_names or package in OWN_PACKAGES or package == _TUTORIAL
    return known or package in _modules_of_dependencies()


@cache
def _modules_of_dependencies() -> frozenset[str]:
    """Return the top-level modules of Maze's dependencies, direct and transitive.

    If Maze is not installed, all installed distributions count. Metadata in the working directory, which may be
    untrusted, is not read.
    """
    places = [place for place in sys.path if place and (Path(place) == _ROOT or Path(place).resolve() != Path.cwd())]
    found: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    installed = next(iter(metadata.distributions(name=_DISTRIBUTION, path=places)), None)
    roots = [_DISTRIBUTION] if installed else [str(each.name) for each in metadata.distributions(path=places)]
    waiting = [(name, frozenset[str]()) for name in roots]
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        distribution = next(iter(metadata.distributions(name=name, path=places)), None)
        if distribution is None:
            continue
        for requirement in distribution.requires or ():
            extra = _OF_EXTRA.search(requirement)
            is_wanted = extra is None or (
                extra[1] not in _FOR_DEVELOPERS if name == _DISTRIBUTION else extra[1] in extras
            )
            if is_wanted and (required := _REQUIREMENT.match(requirement)) is not None:
                required_extras = frozenset(text.strip() for text in (required[2] or "").split(",") if text.strip())
                waiting.append((required[1].lower(), required_extras))
        found.update(modules_of(distribution))
    return frozenset(found)


def modules_of(distribution: metadata.Distribution) -> Iterator[str]:
    """Yield the top-level modules of an installed distribution; some may be named twice."""
    named = distribution.read_text("top_level.txt")
    if named:
        yield from named.split()
    for line in (distribution.read_text("RECORD") or "").splitlines():
        first = line.partition(",")[0].partition("/")[0]
        if first.partition(".")[0].isidentifier() and not first.endswith((".dist-info", ".data")):
            yield first.partition(".")[0]
