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
            parent, members = ".".join(parts[:index]), [each for each in dir(found) if not each.startswith("_")]
            if isinstance(found, ModuleType) and hasattr(found, "__path__"):
                members += [each.name for each in pkgutil.iter_modules(found.__path__)]
            hint = did_you_mean(name, members, f"{parent}.{{}}")
            raise ConfigImportError(f"{_prefix(where)}`{path}` does not exist: `{parent}` has no `{name}`.{hint}")
        found = getattr(found, name)
    if isinstance(found, ModuleType):
        raise ConfigError(f"{_prefix(where)}`{path}` is a module; name a class or function in it.")
    own_name = getattr(found, "__qualname__", getattr(found, "__name__", ""))
    if isinstance(own_module := getattr(found, "__module__", None), str):  # found under any path
        refuse_forbidden_path(f"{own_module}.{own_name}", f"{_prefix(where)}`{path}`")
    return found


def path_of(named: Any) -> str:
    """Return the dotted path of a class or function, valid in other processes.

    Definitions of a script are named by its file, since every process has another `__main__`.
    """
    module = getattr(named, "__module__", None) or "builtins"
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, stem = getattr(main, "__spec__", None), Path(getattr(main, "__file__", "") or "").stem
        if spec is not None:  # python -m
            module = str(spec.name)
        elif stem.isidentifier():  # a notebook or a console has none
            module = stem
    return f"{module}.{getattr(named, '__qualname__', type(named).__name__)}"


def refuse_forbidden_path(path: str, where: str = "") -> None:
    """Refuse targets that execute commands or code, or access files, by their path.

    :raises ConfigError: The path is one of them.
    """
    if is_file_name(path):
        raise ConfigError(f"{_prefix(where)}`{path}` is the name of a file, not of a class or function.")
    is_module_forbidden = path.split(".", maxsplit=1)[0] in _FORBIDDEN_MODULES
    if is_module_forbidden or any(path == p or path.startswith(f"{p}.") for p in _FORBIDDEN_PATHS):
        raise ConfigError(f"{_prefix(where)}`{path}` is refused: configurations may not name it.")


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
                needed = f"it needs the package `{error.name}`"
                raise ConfigImportError(f"{_prefix(where)}`{path}`: importing `{name}` failed, {needed}.") from error
        except ImportError as error:
            raise ConfigImportError(f"{_prefix(where)}`{path}`: importing `{name}` failed: {error}") from error
    top_levels = [module.name for module in pkgutil.iter_modules()]
    hint = did_you_mean(parts[0], top_levels, ".".join(["{}", *parts[1:]]))
    raise ConfigImportError(f"{_prefix(where)}there is no package `{parts[0]}` to find `{path}` in.{hint}")


def _prefix(where: str) -> str:
    return f"{where}: " if where else ""
