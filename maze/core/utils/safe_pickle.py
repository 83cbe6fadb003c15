"""Safe loading: unpickling of data of known types only.

A pickle names classes and functions to call. Each name is looked up *before* an import, and objects are made by checked
constructors (:mod:`~maze.core.utils.pickle_reader`); other names are refused in a message that explains how to allow
them.
"""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from abc import ABC, ABCMeta
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import IO, Any, Generic

from maze.core.errors import CheckpointError
from maze.core.utils import pickle_rules
from maze.core.utils.files import IN_MEMORY, verify_checksum
from maze.core.utils.pickle_reader import RefusedPickleError, Rule, read_pickle

_registered: set[str] = set()
_PLAIN_BASES = (object, ABC, tuple, Enum, Generic, int, str)


def register_safe_types(*types: type | str) -> None:
    """Allow further types in every file that is loaded safely in this process.

    :param types: Classes, their full names, or patterns like `my_project.envs.*` (all classes defined below a module).
    """
    _registered.update(_qualified_name(entry) for entry in types)


def registered_safe_types() -> frozenset[str]:
    """Return the names and patterns of :func:`register_safe_types`."""
    return frozenset(_registered)


def safe_load(
    file: str | Path | IO[bytes],
    allowed: Iterable[type | str] = (),
    allow_pickle: bool = False,
    hint: str | None = None,
    data_classes: Iterable[str] = (),
    own_packages: Iterable[str] = (),
) -> Any:
    """Read a pickle; by default only data of known types.

    Always allowed: containers, numbers, NumPy arrays and generators, gymnasium spaces, tensors, some value types of the
    standard library, and imported event interfaces (classes whose methods do nothing).

    :param file: Path or binary stream.
    :param allowed: Further classes, full names, or patterns `package.module.*`. They are trusted: their constructors
        are called with arguments from the file.
    :param allow_pickle: Trust the file: allow everything, including the execution of code in it.
    :param hint: Instruction to permit a type, for messages.
    :param data_classes: Full names of classes whose instances are filled without calling code of the class, and of
        event interfaces, which are imported if a file names them. A pattern `package.*` matches classes defined there
        that only store data and are derived only from each other and listed classes.
    :param own_packages: Packages of the user whose imported classes are filled in the same way if they only store data.
    :raises CheckpointError: The file cannot be read, is damaged, or holds other data.
    """
    name = str(file) if isinstance(file, (str, Path)) else str(getattr(file, "name", IN_MEMORY))
    try:
        content = Path(file).read_bytes() if isinstance(file, (str, Path)) else file.read()
    except OSError as error:
        raise CheckpointError(f"{name}: cannot be read ({error}).") from error
    way_in = hint or "`allowed=[...]` or `register_safe_types(...)`"
    try:
        sealed = verify_checksum(content, name)
        if allow_pickle:
            return pickle.load(io.BytesIO(sealed))
        return read_pickle(sealed, _Names(allowed, frozenset(data_classes), frozenset(own_packages), way_in).rule)
    except CheckpointError:
        raise
    except RefusedPickleError as error:
        advice = "No code in it was executed. If you trust the whole file, pass `allow_pickle=True`"
        raise CheckpointError(f"{name}: {error}. {advice}.") from error
    except Exception as error:  # a damaged pickle can fail with nearly any type
        raise CheckpointError(f"{name}: is not a readable pickle ({error!r}); it may be truncated.") from error


class _Names:
    """Rules for the names in a pickle.

    :param allowed: Trusted classes, full names, or patterns `package.module.*`.
    :param data_classes: Full names of data classes and event interfaces.
    :param own_packages: Packages of the user with data classes.
    :param way_in: Instruction to permit a type, for messages.
    """

    def __init__(
        self, allowed: Iterable[type | str], data_classes: frozenset[str], own_packages: frozenset[str], way_in: str
    ) -> None:
        entries = {*(_qualified_name(entry) for entry in allowed), *_registered}
        self._trusted = {entry for entry in entries if not entry.endswith(".*")}
        self._prefixes = tuple(entry[:-1] for entry in entries if entry.endswith(".*"))
        self._data_classes = data_classes
        self._data_prefixes = tuple(entry[:-1] for entry in data_classes if entry.endswith(".*"))
        self._own_packages = own_packages
        self._way_in = way_in

    def rule(self, module_name: str, qualified_name: str) -> Rule:
        """Return the rule for a name, or raise an error that explains how to allow it."""
        full_name = f"{module_name}.{qualified_name}"
        rule = (
            pickle_rules.plain_rules().get(full_name)
            or (pickle_rules.space_rules().get(full_name) if module_name.startswith("gymnasium.spaces.") else None)
            or (_tensor_rule(full_name) if module_name.partition(".")[0] == "torch" else None)
            or self._own_rule(module_name, qualified_name, full_name)
        )
        if rule is None:
            advice = f"If it is yours, allow it by name ({self._way_in})"
            raise RefusedPickleError(f"contains the type `{full_name}`, which is not allowed in files. {advice}")
        return rule

    def _own_rule(self, module_name: str, qualified_name: str, full_name: str) -> Rule | None:
        if full_name in self._trusted or full_name.startswith(self._prefixes):
            return self._trusted_rule(_look_up(module_name, qualified_name), full_name in self._trusted)
        is_listed, is_below_listed = full_name in self._data_classes, full_name.startswith(self._data_prefixes)
        is_event_of_listed = full_name.rpartition(".")[0] in self._data_classes
        if not (is_listed or is_below_listed or is_event_of_listed or module_name in sys.modules):
            return None
        found = _look_up(module_name, qualified_name)
        # only under the name of its definition, not what another module has imported
        if isinstance(found, type) and _qualified_name(found) == full_name:
            is_own = module_name.partition(".")[0] in self._own_packages
            # no environment, policy or network: its bases are data, too
            bases = (_qualified_name(base) for base in found.__mro__ if base not in _PLAIN_BASES)
            is_data = all(name in self._data_classes or name.startswith(self._data_prefixes) for name in bases)
            if (is_own or (is_below_listed and is_data)) and (
                rule := pickle_rules.class_that_only_stores(found)
            ) is not None:
                return rule
        if _is_harmless_interface(found):
            return Rule(found)
        return pickle_rules.data_class(found) if is_listed and isinstance(found, type) else None

    def _trusted_rule(self, found: Any, is_named: bool) -> Rule | None:
        # a pattern matches only definitions, not imports of such a module, and no functions but events
        if not is_named and not _qualified_name(found).startswith(self._prefixes):
            return None
        if isinstance(found, type):
            return pickle_rules.trusted_class(found)
        if is_named:
            return Rule(found, call=found)
        return Rule(found) if _is_harmless_interface(found) else None


def _tensor_rule(full_name: str) -> Rule | None:
    if full_name == "torch.storage._load_from_bytes":
        return Rule(_load_storage, call=_load_storage)
    return pickle_rules.torch_rules().get(full_name)


def _load_storage(content: Any) -> Any:
    """Read the values of a tensor in a pickle, which are a checkpoint in the file."""
    from maze.core.utils.checkpoint import read_storage

    return read_storage(content)


def _qualified_name(entry: type | str) -> str:
    return entry if isinstance(entry, str) else f"{entry.__module__}.{entry.__qualname__}"


def _look_up(module_name: str, qualified_name: str) -> Any:
    """Look up a name without running code of attribute access; None: there is none."""
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError:
        return None
    for part in qualified_name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _is_harmless_interface(found: Any) -> bool:
    """Return whether this is an event interface or one of its methods, which do nothing."""
    if isinstance(found, FunctionType):
        owner, _, _ = found.__qualname__.rpartition(".")
        return bool(owner) and _does_nothing(found)
    if type(found) not in (type, ABCMeta):
        return False
    classes = [base for base in found.__mro__ if base not in (object, ABC)]
    return all(_does_nothing(member) for base in classes for member in vars(base).values() if callable(member))


def _does_nothing(function: Any) -> bool:
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    empty_codes = (_with_docstring.__code__.co_code, _without_docstring.__code__.co_code)
    return function.__code__.co_code in empty_codes and not function.__code__.co_names


def _with_docstring() -> None:
    """Do nothing."""


def _without_docstring() -> None:
    pass
