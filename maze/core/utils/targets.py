"""Lookup of the classes and functions that configurations name; dangerous ones are refused."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from maze.core.errors import ConfigError, ConfigImportError, did_you_mean
from maze.core.utils.import_guard import ForeignModuleError

# fmt: off
_FORBIDDEN_MODULES = frozenset({
    "_posixsubprocess", "asyncio", "bdb", "cProfile", "code", "codeop", "cloudpickle", "ctypes", "dill",
    "faulthandler", "gc", "importlib", "inspect", "joblib", "marshal", "mmap", "multiprocessing", "nt", "os", "pdb",
    "pickle", "pip", "pkgutil", "posix", "profile", "pty", "resource", "runpy", "setuptools", "shelve", "shutil",
    "signal", "site", "socket", "subprocess", "sys", "tempfile", "threading", "timeit", "trace", "webbrowser",
})
_FORBIDDEN_PATHS = (
    "builtins.__import__", "builtins.breakpoint", "builtins.compile", "builtins.delattr", "builtins.eval",
    "builtins.exec", "builtins.exit", "builtins.getattr", "builtins.globals", "builtins.input", "builtins.locals",
    "builtins.open", "builtins.quit", "builtins.setattr", "builtins.vars", "hydra.utils.call",
    "hydra.utils.instantiate", "io.open", "numpy.load", "numpy.f2py", "pandas.eval", "pandas.read_pickle",
    "torch.hub", "torch.load", "torch.package", "torch.utils.cpp_extension",
)
# fmt: on
_FILE_SUFFIXES = frozenset({"csv", "jpg", "json", "npy", "npz", "pkl", "png", "pt", "tsv", "txt", "yaml", "yml", "zip"})


def is_file_name(path: str) -> bool:
    """Return whether a text that may be a dotted path is a file name, which is never looked up."""
    return path.rpartition(".")[2] in _FILE_SUFFIXES


def is_module_name(name: str) -> bool:
    """Return whether a text can be imported: identifiers separated by dots."""
    return all(part.isidentifier() for part in name.split("."))


def named_module(name: str, where: str) -> ModuleType:
    """Import a module that a configuration names.

    :param name: Dotted name.
    :param where: Key of the configuration, for messages.
    :raises ConfigError: It is not the name of a module, or cannot be imported.
    """
    if not is_module_name(name):
        raise ConfigError(f"{_prefix(where)}`{name}` is not the name of a module.")
    try:
        return importlib.import_module(name)
    except ForeignModuleError:
        raise
    except ImportError as error:
        raise ConfigImportError(f"{_prefix(where)}module `{name}` cannot be imported: {error}") from error


def locate(path: str, where: str = "") -> Any:
    """Return the object at a dotted path, such as `package.module.Class`.

    :param path: Module path and name(s) in it.
    :param where: Key of the configuration, for messages.
    :raises ConfigError: There is no such object, or configurations may not name it.
    """
    refuse_forbidden_path(path, where)
    parts = path.split(".")
    if len(parts) < 2 or not is_module_name(path):
        raise ConfigError(f"{_prefix(where)}`{path}` is not a dotted path to a class or function.")
    module, depth = _import_deepest_module(parts, path, where)
    found: Any = module
    for index, name in enumerate(parts[depth:], depth):
        if not hasattr(found, name):
            parent = ".".join(parts[:index])
            raise ConfigImportError(
                f"{_prefix(where)}`{path}` does not exist: `{parent}` has no `{name}`.{_similar(name, found, parent)}"
            )
        found = getattr(found, name)
    refuse_forbidden_object(found, path, where)
    return found


def path_of(named: Any) -> str:
    """Return the dotted path of a class or function, valid in other processes.

    Definitions of a script are named by its file, since every process has another `__main__`.
    """
    module = getattr(named, "__module__", None) or "builtins"
    if module == "__main__":
        module = _name_of_script() or module
    return f"{module}.{getattr(named, '__qualname__', type(named).__name__)}"


def _name_of_script() -> str | None:
    """Return the module name of the running script; `None`: a notebook or a console has none."""
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:  # python -m
        return str(spec.name)
    stem = "" if file is None else Path(file).stem
    return stem if stem.isidentifier() else None


def refuse_forbidden_path(path: str, where: str = "") -> None:
    """Refuse targets that execute commands or code, or access files, by their path.

    :raises ConfigError: The path is one of them.
    """
    if is_file_name(path):
        raise ConfigError(f"{_prefix(where)}`{path}` is the name of a file, not of a class or function.")
    is_module_forbidden = path.split(".", maxsplit=1)[0] in _FORBIDDEN_MODULES
    if is_module_forbidden or any(path == p or path.startswith(f"{p}.") for p in _FORBIDDEN_PATHS):
        raise ConfigError(f"{_prefix(where)}`{path}` is refused: configurations may not name it.")


def refuse_forbidden_object(found: Any, path: str, where: str = "") -> None:
    """Refuse such targets by the object, found under any path.

    :raises ConfigError: The object is one of them, or a module.
    """
    module = getattr(found, "__module__", None)
    name = getattr(found, "__qualname__", getattr(found, "__name__", ""))
    if isinstance(found, ModuleType):
        raise ConfigError(f"{_prefix(where)}`{path}` is a module; name a class or function in it.")
    if isinstance(module, str):
        try:
            refuse_forbidden_path(f"{module}.{name}")
        except ConfigError:
            raise ConfigError(
                f"{_prefix(where)}`{path}` is refused: it is `{module}.{name}`, which configurations may not name."
            ) from None


def _import_deepest_module(parts: list[str], path: str, where: str) -> tuple[ModuleType, int]:
    for depth in range(len(parts), 0, -1):
        name = ".".join(parts[:depth])
        try:
            return importlib.import_module(name), depth
        except ForeignModuleError:
            raise
        except ModuleNotFoundError as error:
            # either this is not a module, or the module exists and one of its imports does not
            if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
                raise ConfigImportError(
                    f"{_prefix(where)}`{path}`: importing `{name}` failed, it needs the package `{error.name}`."
                ) from error
        except ImportError as error:
            raise ConfigImportError(f"{_prefix(where)}`{path}`: importing `{name}` failed: {error}") from error
    top_levels = [module.name for module in pkgutil.iter_modules()]
    hint = did_you_mean(parts[0], top_levels, ".".join(["{}", *parts[1:]]))
    raise ConfigImportError(
        f"{_prefix(where)}there is no package `{parts[0]}` to find `{path}` in. Is it installed or on PYTHONPATH?{hint}"
    )


def _similar(name: str, container: Any, parent: str) -> str:
    candidates = [member for member in dir(container) if not member.startswith("_")]
    if isinstance(container, ModuleType) and hasattr(container, "__path__"):
        candidates += [module.name for module in pkgutil.iter_modules(container.__path__)]
    return did_you_mean(name, candidates, f"{parent}.{{}}")


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""
